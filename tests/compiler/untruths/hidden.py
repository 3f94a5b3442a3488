"""Lies that were believed in other words: through helpers, tuples, choices, loops, memory, casts of parts and masks."""

from __future__ import annotations

from tests.compiler.annotated import SCALE, STREAMED, changed
from tests.compiler.untruths.believed import COLUMNED, COLUMNS, FLAT, NUMBER, TOTAL
from tests.compiler.untruths.lies import ATTENTION, BEHIND, LOAD, PERSISTENT, SIZED, STORE, STORED, STREAM, Lie

UNSEEN, IN_ORDER, TOLD = "no file here shows", "which come in another order", "depends on a condition"
HELPER, PERSISTED = "@triton.jit\ndef helper", "    # @overweave.tile_id persistent\n"
ENDS = "    inside = (rows[:, None] < M) & (cols[None, :] < N)\n"


def of_number(made: str, top: str = "", found: str = NUMBER) -> Lie:
    """A kernel that adds `bonus` to what it stores. top: what stands above it in its file."""
    text = f"{made}{BEHIND}    tl.store(y_ptr + at, x + bonus)"
    return Lie(SCALE, ((BEHIND + "    " + STORED, text), (HELPER, f"{top}\n\n\n{HELPER}")), STORE, found)


def of_memory(made: str, blamed: str, top: str = "") -> Lie:
    """A kernel whose tiles hand something on through memory."""
    return Lie(SCALE, ((BEHIND, made + BEHIND), (HELPER, f"{top}\n\n\n{HELPER}")), blamed, IN_ORDER)


def of_stream(turn: str, blamed: str = STREAM, found: str = "total is carried", top: str = "") -> Lie:
    """A streamed loop with another turn."""
    text = STREAMED.replace("q_ptr, k_ptr", "q_ptr, z_ptr, k_ptr").replace("@triton.jit", f"{top}\n\n\n@triton.jit")
    return Lie(text, ((TOTAL, turn),), blamed, found)


def of_softmax(old: str, new: str) -> Lie:
    return Lie(ATTENTION, ((old, new),), STREAM, "is carried")


def of_store(stored: str, found: str, **numbers: int) -> Lie:
    return Lie(SCALE, ((BEHIND + "    " + STORED, stored),), STORE, found, SIZED | numbers)


def of_cast(old: str, new: str, rows: int, found: str) -> Lie:
    return Lie(SCALE, ((old, new),), LOAD, found, SIZED | {"M": rows})


def of_tiles(begun: str, tile: str, kept: str, top: str = "") -> Lie:
    """A persistent kernel that carries something from tile to tile. kept: what it adds to its result."""
    stored, store = "accumulator.to(c_desc.dtype)", "        # @overweave.store C="
    text = changed(PERSISTENT, ("@triton.jit", f"{top}\n\n\n@triton.jit"), (PERSISTED, begun + PERSISTED))
    return Lie(text, ((store, tile + store), (stored, f"{stored} + {kept}")), "store C=", NUMBER)


def jitted(text: str) -> str:
    return f"@triton.jit\ndef {text}"


NUMBERS = [
    of_number("    bonus = tl.extra.cuda.smid()\n"),
    of_number("    number = tl.program_id\n    bonus = number(0)\n", found=UNSEEN),
    of_number("    bonus = pick(1.0, pid)\n", jitted("pick(*xs):\n    return xs[1]")),
    of_number("    both = (1.0, pid)\n    bonus = pick(*both)\n", jitted("pick(a, b):\n    return b")),
    of_number("    (a, (b, bonus)) = (1.0, (2.0, pid))\n"),
    of_number("    bonus = [pid * i for i in (1, 2)][0]\n"),
    of_number("    bonus = 1.0 if pid > 3 else 0.0\n"),
    of_number("    bonus = tl.where(pid > 3, 1.0, 0.0)\n"),
    of_number("    bonus = tl.num_programs(0) * 1.0\n"),
    of_number(
        "    bonus = outer(pid)\n",
        jitted("inner(n):\n    if n > 3:\n        return 1.0\n    return 0.0\n\n\n")
        + jitted("outer(n):\n    return inner(n) * 2"),
    ),
    of_number("    bonus = 0.0\n    for i in tl.static_range(4):\n        if i < pid:\n            bonus += 1.0\n"),
    of_number("    bonus = 0\n    more = True\n    while more:\n        bonus += 1\n        more = bonus < pid\n"),
    of_number("    bonus = tl.reduce(x, 0, both)\n", jitted("both(a, b):\n    return a + b * tl.program_id(0)")),
    of_number(
        "    bonus = tl.associative_scan(x, 0, both)\n", jitted("both(a, b):\n    return a + b * tl.program_id(0)")
    ),
    of_number("    bonus = tl.inline_asm_elementwise('mov.u32 $0, %' + 'ctaid.x;', '=r', [])\n", found=UNSEEN),
    of_number("    bonus = 0.0\n    if x_ptr.dtype.element_ty == tl.float32:\n        bonus = pid * 1.0\n"),
    of_number(
        "    bonus = 0.0\n    if FLAG:\n        bonus = 1.0\n    else:\n        bonus = pid\n",
        "FLAG = tl.constexpr(1 == 2)",
    ),
    of_number("    bonus = 0.0\n    if MODE == 'a':\n        bonus = pid\n", "MODE = tl.constexpr('ab'[0:1])"),
    of_number("    bonus = 0.0\n    with tl.device():\n        bonus = pid\n"),
    Lie(
        SCALE,
        (
            ("    # @overweave.load X=x_ptr[M, N]\n", ""),
            (
                "    x = tl.load(x_ptr + at)\n",
                "    d = tl.make_tensor_descriptor(x_ptr, [M, N - pid % 2 * 4], [N, 1], [BLOCK_M, BLOCK_N])\n"
                "    # @overweave.load X=x_ptr[M, N]\n    x = d.load([pid_m * BLOCK_M, pid_n * BLOCK_N])\n",
            ),
        ),
        LOAD,
        NUMBER,
    ),
    of_number(
        "    d = tl.make_tensor_descriptor(z_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])\n"
        "    bonus = tl.load_tensor_descriptor(d, [pid * BLOCK_M, 0])\n",
    )._replace(blamed="tl.load_tensor_descriptor"),
]
BUMP = jitted("bump(p):\n    before = tl.load(p)\n    tl.store(p, before + 1.0)\n    return before")
MEMORY = [
    of_memory("    before = tl.load(z_ptr)\n    tl.store(z_ptr, before + 1.0)\n", "tl.store(z_ptr"),
    of_memory("    x += tl.load(z_ptr + pid_m)\n    tl.store(z_ptr + pid_m + 1, tl.sum(x))\n", "tl.store(z_ptr"),
    of_memory("    x += bump(z_ptr)\n", "tl.store(p", BUMP),
    of_memory("    x += tl.load(y_ptr + at - BLOCK_M * N)\n", STORED),
    of_memory("    tl.atomic_add(z_ptr, 1.0)\n    x += tl.load(z_ptr)\n", "tl.atomic_add"),
    of_memory(
        "    x += tl.load(tl.where(pid_m > 2, z_ptr + 1, z_ptr + 2))\n    tl.store(z_ptr + pid_m, 1.0)\n",
        "tl.store(z_ptr",
    ),
]
KEEP = jitted("keep(p, v):\n    tl.store(p, v)")
STREAMS = [
    of_stream(f"        tl.store(z_ptr, tl.sum(total))\n{TOTAL}"),
    of_stream(f"{TOTAL}        keep(z_ptr, tl.sum(k))\n", "tl.store(p", "stores to the same address", KEEP),
    of_stream(f"{TOTAL}        keep(z_ptr + start, total)\n", "tl.store(p", "stores to the same address", KEEP),
    of_stream(
        f"{TOTAL}        for _ in range(0, start // BLOCK % 2):\n            total = tl.zeros((BLOCK,), tl.float32)\n"
    ),
    of_stream(
        f"{TOTAL}        more = tl.load(z_ptr + start)\n        while more > 5.0:\n"
        "            total = tl.zeros((BLOCK,), tl.float32)\n            more -= 1.0\n"
    ),
    of_stream("        total = tl.minimum(tl.maximum(total, tl.max(k)), tl.min(k) + 2.0)\n"),
    of_stream("        total = tl.maximum(total, tl.sum(tl.dot(q, k), 1)) * 0.999\n"),
    of_stream("        total = (total + tl.sum(tl.dot(q, k), 1)).to(tl.int32)\n"),
    of_stream("        total = tl.trans(total) + tl.dot(q, k)\n"),
    of_stream("        (a, (total, b)) = (1, (total * 0.999 + tl.sum(k), 2))\n"),
    of_stream("        [a, total] = [1, total * 0.999 + tl.sum(k)]\n"),
    of_stream("        a, total = pair(total, k)\n", top=jitted("pair(a, b):\n    return b, a * 0.999 + b")),
    of_softmax("tl.exp(peak - above)", "tl.exp(peak - above - 0.001)"),
    of_softmax("tl.exp(peak - above)", "tl.exp2(peak - above)"),
    of_softmax("tl.exp(peak - above)", "tl.exp((peak - above) * 1.001)"),
    of_softmax("peak = above\n", "peak = above * 0.999\n"),
    of_softmax("peak = above\n", "peak = tl.maximum(above, tl.max(scores * 1.01, 1))\n"),
    of_softmax("        peak = above\n", "        if tl.sum(keys) > 0:\n            peak = above\n"),
    of_softmax("        total = total * shrink", "        if tl.sum(keys) > 0:\n            total = total * shrink"),
]
CASTS = [
    of_cast("rows = pid_m * BLOCK_M", "rows = pid_m.to(tl.int16) * BLOCK_M", 40000, "that int16 does not hold"),
    of_cast("rows = pid_m * BLOCK_M", "rows = (pid_m.to(tl.int16) << 4)", 40000, "that int16 does not hold"),
    of_cast("rows = pid_m * BLOCK_M", "rows = (pid_m.to(tl.float16) * 16).to(tl.int32)", 6000, "float16 does not hold"),
]
STORES = [
    of_store(f"{BEHIND}    tl.store(y_ptr + at, x, mask=N < 100)", "a tile stores [0:0]", N=1000),
    of_store(f"{BEHIND}    tl.store(y_ptr + at, x, mask=(rows[:, None] >= 0) & (N != 1000))", "stores [0:0]", N=1000),
    of_store(f"{BEHIND}    tl.store(y_ptr + at, x, mask=True ^ (rows[:, None] < 5))", "not the end of"),
    of_store(f"{ENDS}{BEHIND}    tl.store(y_ptr + at, x, mask=tl.logical_or(rows[:, None] < M - 1, x > 0))", TOLD),
    of_store(f"{BEHIND}    tl.store(y_ptr + at, x, mask=(rows[:, None] < M - 1).logical_and(cols < N))", TOLD),
    of_store(
        f"    more = tl.load(z_ptr)\n    while more > 0.0:\n        more -= 1.0\n    {BEHIND}        {STORED}", TOLD
    ),
    of_store(
        f"    more = N // 1000\n    while more > 0:\n        more -= 1\n    {BEHIND}        {STORED}", "no tile comes"
    ),
    of_store(f"    for _ in tl.range(0, arg2=N // 1000):\n    {BEHIND}        {STORED}", "no tile comes"),
]
LOOPS = [
    Lie(COLUMNS.replace("LOOP", loop).replace("MASKED", f", mask={FLAT}"), (), LOAD, found, COLUMNED)
    for loop, found in (
        ("for k in tl.range(0, arg2=N + EXTRA, step=BLOCK_N):", "it reaches 0 to 111"),
        ("k = -BLOCK_N\n    while k + BLOCK_N < M:\n        k += BLOCK_N", "it reaches 0 to 95"),
        ("k = N + EXTRA\n    while k > 0:\n        k -= BLOCK_N", "along M it reaches"),
        ("ends = (N, M)\n    for k in range(0, ends[1], BLOCK_N):", "it reaches 0 to 95"),
    )
]
CARRIED = [
    of_tiles("    st = (0.0, 1.0)\n", "        st = (st[1], st[0] + 1.0)\n", "st[0]"),
    of_tiles("    a = 0.0\n    b = 1.0\n", "        a, b = b, a\n", "a"),
    of_tiles("    a = 0.0\n", "        a = more(a)\n", "a", jitted("more(a):\n    return a + 1.0")),
    of_tiles("    a = 0.0\n", "        if pid_m == 0:\n            a = 1.0\n", "a"),
    of_tiles("    a = 0.0\n", "        for _ in tl.static_range(2):\n            a = a + 1.0\n", "a"),
    of_tiles(
        "    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
        "        a = tl.where(accumulator > 0, accumulator, a)\n",
        "a",
    ),
]
HIDDEN = [*NUMBERS, *MEMORY, *STREAMS, *CASTS, *STORES, *LOOPS, *CARRIED]

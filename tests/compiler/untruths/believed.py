"""Lies that were believed: what a program id, a loop, memory, a cast or a descriptor makes of a tile."""

from __future__ import annotations

from tests.compiler.annotated import SCALE, STREAMED
from tests.compiler.untruths.lies import BEHIND, LOAD, PERSISTENT, ROWS, SIZED, STORE, STORED, STREAM, Lie

NUMBER = "a program id"
OF_ASSEMBLY = "'=r', args=[], dtype=tl.int32, is_pure=True, pack=1"
DATA = "    far = tl.load(z_ptr).to(tl.int32)\n"


def of_number(made: str) -> Lie:
    """A kernel that adds `bonus` to what it stores, and makes it from the program's number."""
    text = f"{made}{BEHIND}    tl.store(y_ptr + at, x + bonus)"
    return Lie(SCALE, ((BEHIND + "    " + STORED, text),), STORE, NUMBER)


def of_columns(loop: str, found: str, mask: str = "") -> Lie:
    """A kernel of whole rows whose loop over columns goes on into the next ones."""
    masked = f", mask={mask}, other=0.0" if mask else ""
    rows = COLUMNS.replace("LOOP", loop).replace("MASKED", masked)
    return Lie(rows, (), LOAD, found, COLUMNED)


COLUMNED = {"M": 96, "N": 80, "EXTRA": 32, "BLOCK_M": 16, "BLOCK_N": 16}
COLUMNS = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, z_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTRA: tl.constexpr = 0):
    # @overweave.axis M block=BLOCK_M
    # @overweave.tile_id
    pid_m = tl.program_id(0)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M,), tl.float32)
    LOOP
        cols = k + tl.arange(0, BLOCK_N)
        # @overweave.load X=x_ptr[M, N]
        x = tl.load(x_ptr + rows[:, None] * N + cols[None, :]MASKED)
        total += tl.sum(x, 1)
    # @overweave.store Y=y_ptr[M]
    tl.store(y_ptr + rows, total, mask=rows < M)
"""
FLAT = "rows[:, None] * N + cols[None, :] < M * N"
NUMBERS = [
    of_number("    bonus = 0\n    while bonus < pid:\n        bonus += 1\n"),
    of_number("    bonus = 0.0\n    n = pid\n    while n > 0:\n        bonus += 1.0\n        n -= 1\n"),
    of_number("    bonus = 0.0\n    for _ in range(0, pid):\n        bonus += 1.0\n"),
    of_number("    bonus = 0.5 + pid\n"),
    of_number("    bonus = tl.sum(tl.full((16,), 1.0, tl.float32) * pid)\n"),
    of_number("    bonus = 0.0\n    if pid > 3:\n        bonus = 1.0\n"),
    of_number("    bonus = tl.atomic_add(z_ptr, 1.0)\n"),
    of_number(f"    bonus = tl.inline_asm_elementwise('mov.u32 $0, %ctaid.x;', {OF_ASSEMBLY})\n"),
    of_number(f"    bonus = tl.inline_asm_elementwise(asm='mov.u32 $0, %smid;', constraints={OF_ASSEMBLY})\n"),
]
COLUMNS_OF = [
    of_columns("for k in range(0, N + EXTRA, BLOCK_N):", "it reaches 0 to 111", FLAT),
    of_columns("for k in range(0, M, BLOCK_N):", "it reaches 0 to 95"),
    of_columns("for k in range(0, N + M // 64 * BLOCK_N, BLOCK_N):", "it reaches 0 to 95", FLAT),
    of_columns("for k in range(0, tl.load(z_ptr).to(tl.int32), BLOCK_N):", "loaded data says", FLAT),
    of_columns("for k in range(0, tl.cdiv(tl.load(z_ptr), 2), BLOCK_N):", "loaded data says"),
    of_columns("for k in range(0, pid_m * BLOCK_N + BLOCK_N, BLOCK_N):", "it reaches 0 to 95"),
    of_columns("k = 0\n    while k < M:\n        k += BLOCK_N", "it reaches 16 to 111"),
]
CASTS = [
    Lie(SCALE, ((ROWS, f"{ROWS}    rows = rows.to(tl.int8)\n"),), LOAD, "that int8 does not hold", SIZED | {"M": 200}),
    Lie(SCALE, ((ROWS, f"{ROWS}    rows = tl.cast(rows, tl.uint8)\n"),), LOAD, "uint8", SIZED | {"M": 400}),
    Lie(SCALE, ((ROWS, f"{ROWS}    rows = rows.to(tl.float16).to(tl.int32)\n"),), LOAD, "float16", SIZED | {"M": 4000}),
    Lie(
        SCALE,
        (("    at = rows[:, None] * N", "    at = (rows[:, None] * N).to(tl.int16)"),),
        LOAD,
        "that int16 does not hold",
        SIZED | {"M": 4000},
    ),
]
SEEN = "    seen = 0.0\n    # @overweave.tile_id persistent\n"
CARRIED = [
    Lie(
        PERSISTENT,
        (
            ("    # @overweave.tile_id persistent\n", SEEN),
            ("        # @overweave.store C=", "        seen += 1.0\n        # @overweave.store C="),
            (
                "[offs_am, offs_bn], accumulator.to(c_desc.dtype)",
                "[offs_am, offs_bn], accumulator.to(c_desc.dtype) + seen",
            ),
        ),
        "store C=",
        NUMBER,
    ),
    Lie(
        PERSISTENT,
        (
            ("def persistent_kernel(", "def persistent_kernel(\n    z_ptr,"),
            (
                "        # @overweave.store C=",
                "        before = tl.load(z_ptr)\n        tl.store(z_ptr, before + 1)\n        # @overweave.store C=",
            ),
        ),
        "tl.store(z_ptr",
        "which come in another order",
    ),
]
TOTAL = "        total += tl.sum(tl.dot(q, k), 1)\n"
STREAMS = [
    Lie(STREAMED, (("range(0, S", "range(8, S"),), STREAM, "begins at 8", {"Q": 32, "S": 64, "D": 16, "BLOCK": 16}),
    Lie(
        STREAMED,
        (("Q, S, D", "Q, S, EXTRA, D"), ("range(0, S", "range(EXTRA, S")),
        STREAM,
        "begins at 24",
        {"Q": 32, "S": 64, "D": 16, "BLOCK": 16, "EXTRA": 24},
    ),
    Lie(STREAMED, ((TOTAL, f"{TOTAL}        tl.store(q_ptr, tl.sum(k))\n"),), STREAM, "stores to the same address"),
    Lie(
        STREAMED,
        (
            ("q_ptr, k_ptr", "q_ptr, z_ptr, k_ptr"),
            (TOTAL, f"{TOTAL}        last = tl.load(z_ptr)\n        tl.store(z_ptr + start, last + tl.sum(k))\n"),
        ),
        "tl.store(z_ptr",
        "loaded and stored",
    ),
    Lie(
        STREAMED,
        (
            ("q_ptr, k_ptr", "q_ptr, z_ptr, k_ptr"),
            (TOTAL, f"{TOTAL}        last = tl.atomic_xchg(z_ptr, 1.0)\n        total += last\n"),
        ),
        "tl.atomic_xchg(z_ptr",
        "loaded and stored",
    ),
]
POINTER = "tl.make_block_ptr(y_ptr, shape=(SHAPE), strides=(N, 1), offsets=(pid_m * BLOCK_M, pid_n * BLOCK_N), "
POINTER += "block_shape=(BLOCK_M, BLOCK_N), order=(1, 0))"
DESCRIPTOR = "    d = tl.make_tensor_descriptor(y_ptr, shape=[SHAPE], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N])\n"
KEPT = "d.store([pid_m * BLOCK_M, pid_n * BLOCK_N], x)"


def of_shape(shape: str) -> list[Lie]:
    """A result that is stored through a descriptor, or a block pointer, which ends too early."""
    described = f"{DESCRIPTOR.replace('SHAPE', shape)}{BEHIND}    {KEPT}"
    pointed = f"{BEHIND}    tl.store({POINTER.replace('SHAPE', shape)}, x, boundary_check=(0, 1))"
    texts = (described, pointed)
    return [Lie(SCALE, ((BEHIND + "    " + STORED, text),), STORE, "not the end of", SIZED) for text in texts]


SHAPES = [*of_shape("M // 2, N"), *of_shape("M, N - 1"), *of_shape("M - 1, N")]
TURNLESS = [
    Lie(
        SCALE,
        (
            ("BLOCK_N: tl.constexpr)", "BLOCK_N: tl.constexpr, TURNS: tl.constexpr)"),
            (BEHIND + "    " + STORED, f"    for _ in range(TURNS):\n    {BEHIND}        {STORED}"),
        ),
        STORE,
        "no tile comes to it",
        SIZED | {"TURNS": 0},
    ),
    Lie(
        SCALE,
        ((BEHIND + "    " + STORED, f"    for _ in range(0, pid_m):\n    {BEHIND}        {STORED}"),),
        STORE,
        "depends on a condition",
        SIZED,
    ),
    Lie(
        SCALE,
        ((BEHIND + "    " + STORED, f"{DATA}    for _ in range(0, far):\n    {BEHIND}        {STORED}"),),
        STORE,
        "depends on",
        SIZED,
    ),
]
BELIEVED = [*NUMBERS, *COLUMNS_OF, *CASTS, *CARRIED, *STREAMS, *SHAPES, *TURNLESS]

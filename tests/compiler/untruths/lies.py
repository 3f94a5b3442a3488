"""Kernels that tell untruths: a true one, what is changed in it, the line that is blamed, and what is said of it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.compiler.annotated import SCALE, STREAMED
from tests.source_tree import ROOT

KERNELS = ROOT / "examples" / "kernels"
MATMUL, NORM, PERSISTENT, ATTENTION = (
    (KERNELS / f"{name}.py").read_text() for name in ("matmul", "norm", "persistent", "attention")
)
Change = tuple[str, str]


def alone(name: str) -> str:
    """A kernel of true_places.py in a file of its own."""
    text = Path(__file__).with_name("true_places.py").read_text()
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    body = "\n".join(text.splitlines()[found.lineno - 1 : found.end_lineno])
    return f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{body}\n"


class Lie(NamedTuple):
    """blamed: in the line that the error names. call: the numbers with which it is found out, at the latest; None when
    it is read."""

    text: str
    changes: tuple[Change, ...]
    blamed: str
    found: str
    call: Mapping[str, int] | None = None


def lies(text: str, *told: tuple[str, str, str, str], call: Mapping[str, int] | None = None) -> list[Lie]:
    """Lies of one change each: what stands there, what takes its place, the line, what is said."""
    return [Lie(text, ((old, new),), blamed, found, call) for old, new, blamed, found in told]


NUMBERED = {"M": 96, "N": 80, "K": 64, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 4}
STRIDED = NUMBERED | {
    "stride_am": 64,
    "stride_ak": 1,
    "stride_bk": 80,
    "stride_bn": 1,
    "stride_cm": 80,
    "stride_cn": 1,
}
SIZED = {"M": 96, "N": 80, "BLOCK_M": 16, "BLOCK_N": 32}
SHAPES = {f"{name}_desc.block_shape[{at}]": 16 for name in "abc" for at in (0, 1)}
ROWS = "    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)\n"
COLS = "    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)\n"
LOAD, STORE = "load X=x_ptr[M, N]", "store Y=y_ptr[M, N]"
STORED = "tl.store(y_ptr + at, x)"
BEHIND = "    # @overweave.store Y=y_ptr[M, N]\n"

PLACES = lies(
    SCALE,
    ("axis M block=BLOCK_M", "axis M block=2 * BLOCK_M", LOAD, "the blocks of M are BLOCK_M apart"),
    ("axis N block=BLOCK_N", "axis N block=BLOCK_N // 2", LOAD, "the blocks of N are 32"),
    (ROWS, ROWS[:-1] + " + 1\n", LOAD, "elements 1 to BLOCK_M of a block of BLOCK_M"),
    (ROWS, ROWS[:-1] + " - 1\n", LOAD, "elements -1 to BLOCK_M - 2 of a block of BLOCK_M"),
    (ROWS, "    rows = (pid_m + 1) * BLOCK_M + tl.arange(0, BLOCK_M)\n", LOAD, "elements BLOCK_M to 2 * BLOCK_M - 1"),
    (
        ROWS,
        "    rows = M - 1 - (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))\n",
        LOAD,
        "the blocks of M are -BLOCK_M apart",
    ),
    (ROWS, "    rows = (tl.cdiv(M, BLOCK_M) - 1 - pid_m) * BLOCK_M + tl.arange(0, BLOCK_M)\n", LOAD, "-BLOCK_M apart"),
    (ROWS, "    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M) * 2\n", LOAD, "elements 0 to 2 * BLOCK_M - 2"),
    (ROWS, "    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M // 2) * 2\n", STORE, "a tile stores [0:15:2], [0:32]"),
    (ROWS, f"{ROWS}    rows = rows * 2\n", LOAD, "the blocks of M are 2 * BLOCK_M apart"),
    (ROWS, f"{ROWS}    rows = tl.where(rows > 5, rows, 0)\n", LOAD, "is not computed from pid_m"),
    (ROWS, f"{ROWS}    rows = tl.where(rows < 64, rows, 0)\n", LOAD, "pid_m stands inside of"),
    (ROWS, f"{ROWS}    rows = rows % 64\n", LOAD, "elements -80 to 63"),
    (ROWS, f"{ROWS}    rows = tl.load(z_ptr + rows)\n", LOAD, "is not computed from pid_m"),
    (ROWS, f"{ROWS}    rows += tl.load(z_ptr + rows)\n", LOAD, "what loaded data says"),
    (ROWS, f"    pid_m = pid_m + 1\n{ROWS}", LOAD, "elements BLOCK_M to"),
    (ROWS, f"    pid_m = pid_m // 2\n{ROWS}", LOAD, "pid_m stands inside of"),
    (ROWS, f"    pid_m = pid_m ^ 1\n{ROWS}", LOAD, "pid_m stands inside of"),
    (ROWS, f"    if pid_n > 2:\n        pid_m = pid_m + 1\n{ROWS}", LOAD, "is not computed from pid_m"),
    (LOAD, "load X=x_ptr[N, M]", "load X=x_ptr[N, M]", "the blocks of N are"),
    ("pid_map M=pid_m N=pid_n", "pid_map M=pid_n N=pid_m", LOAD, "the blocks of M are BLOCK_N elements apart"),
    ("rows[:, None] * N + cols", "rows[:, None] * N + N + cols", LOAD, "elements 1 to BLOCK_M"),
    ("rows[:, None] * N + cols", "rows[:, None] * N + 1 + cols", LOAD, "elements 1 to BLOCK_N of a block of BLOCK_N"),
    ("rows[:, None] * N", "rows[:, None] * (N + 1)", STORE, "moves along two dimensions"),
    (COLS, "    cols = (pid_n + 1) * BLOCK_N + tl.arange(0, BLOCK_N)\n", LOAD, "along N it reaches elements BLOCK_N"),
    (COLS, "    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N // 2)\n", STORE, "a tile stores [0:16], [0:16]"),
    ("tl.load(x_ptr + at)", "tl.load(helper(x_ptr) + at + helper(N))", LOAD, "elements 1 to BLOCK_M"),
    call=SIZED,
)
CONDITIONS = lies(
    SCALE,
    (STORED, "tl.store(y_ptr + at, x, mask=rows[:, None] % 2 == 0)", STORE, "depends on a condition"),
    (STORED, "tl.store(y_ptr + at, x, mask=(rows[:, None] < M - 1) & (cols[None, :] < N))", STORE, "not the end of"),
    (STORED, "tl.store(y_ptr + at, x, mask=x > 0)", STORE, "depends on"),
    (STORED, "tl.store(y_ptr + at, x, mask=(rows[:, None] < M - 1) * (cols[None, :] < N))", STORE, "not the end of"),
    (STORED, "tl.store(y_ptr + at, x, mask=~((rows[:, None] >= M - 1) | (cols[None, :] >= N)))", STORE, "not the end"),
    (STORED, "tl.store(y_ptr + at, x, mask=~((rows[:, None] >= M) | (x > 0)))", STORE, "depends on"),
    (STORED, "tl.store(y_ptr + at, x, mask=tl.load(z_ptr + rows)[:, None] > 0)", STORE, "depends on"),
    (f"{BEHIND}    {STORED}", f"    if pid_m > 0:\n    {BEHIND}        {STORED}", STORE, "not the end of"),
    (f"{BEHIND}    {STORED}", f"    if tl.sum(x) > 0:\n    {BEHIND}        {STORED}", STORE, "depends on"),
    call=SIZED,
)
NUMBERS = lies(
    SCALE,
    (BEHIND, f"    tl.store(z_ptr + pid, 1.0)\n{BEHIND}", "tl.store(z_ptr + pid, 1.0)", "a program id"),
    (BEHIND, f"    aux = pid * 2\n    tl.store(z_ptr, aux)\n{BEHIND}", "tl.store(z_ptr, aux)", "a program id"),
    (BEHIND, f"    x *= tl.rand(7, pid)\n{BEHIND}", STORE, "a program id"),
    (BEHIND, f"    x *= tl.load(z_ptr + pid)\n{BEHIND}", "x *= tl.load(z_ptr + pid)", "a program id"),
    (BEHIND, f"    if pid == 0:\n        tl.store(z_ptr, 1.0)\n{BEHIND}", "tl.store(z_ptr, 1.0)", "a program id"),
    (BEHIND, f"    tl.atomic_add(z_ptr + tl.program_id(0), 1.0)\n{BEHIND}", "tl.atomic_add", "a program id"),
)
TOTAL, STREAM = "        total += tl.sum(tl.dot(q, k), 1)\n", "stream S"
STREAMS = lies(
    STREAMED,
    (TOTAL, "        total = total * 0.5 + tl.sum(tl.dot(q, k), 1)\n", STREAM, "total is carried between iterations"),
    (TOTAL, "        total = tl.sum(tl.dot(q, k), 1)\n", STREAM, "total is carried between iterations"),
    (
        TOTAL,
        f"        if start == 0:\n            total = tl.sum(tl.dot(q, k), 1)\n        else:\n    {TOTAL}",
        STREAM,
        "is used in a condition",
    ),
    (TOTAL, f"        if start > 0:\n    {TOTAL}", STREAM, "is used in a condition"),
    (
        TOTAL,
        "        s = tl.sum(tl.dot(q, k), 1)\n        total = tl.where(start == 0, s, total + s)\n",
        STREAM,
        "total",
    ),
    (TOTAL, "        total += tl.sum(tl.dot(q, k), 1) * turns\n", STREAM, "turns is carried"),
    (TOTAL, f"{TOTAL}        tl.store(q_ptr + start, total)\n", STREAM, "total is carried"),
    (TOTAL, "        total = tl.maximum(total * 0.9, tl.sum(tl.dot(q, k), 1))\n", STREAM, "total is carried"),
    (TOTAL, f"{TOTAL}        total = tl.sqrt(total)\n", STREAM, "total is carried"),
)
SOFTMAX = lies(
    ATTENTION,
    ("total = total * shrink + tl", "total = total + tl", STREAM, "total is carried"),
    ("values, mixed * shrink[:, None])", "values, mixed)", STREAM, "mixed is carried"),
    ("tl.exp(scores - above[:, None])", "tl.exp(scores - peak[:, None])", STREAM, "is carried"),
    ("shrink = tl.exp(peak - above)", "shrink = tl.exp(above - peak)", STREAM, "is carried"),
    ("        peak = above\n", "        peak = tl.max(scores, 1)\n", STREAM, "is carried"),
    ("        places = start +", "        places = start + BLOCK_S +", "load K=k[S, H, D]", "along S it reaches"),
    ("(places[:, None] * H + head) * D", "(places[:, None] * H + head + 1) * D", "load V=v[S, H, D]", "along H"),
)
DIRECTIVES = lies(
    SCALE,
    (f"@overweave.{LOAD}", f"@overweve.{LOAD}", "@overweve", "no directive has this form"),
    (f"@overweave.{LOAD}", f"@overweave {LOAD}", "@overweave load", "no directive has this form"),
    (f"@overweave.{LOAD}", f"@Overweave.{LOAD}", "@Overweave", "no directive has this form"),
    (LOAD, "load X=x_ptr[M, 0]", "x_ptr[M, 0]", "never more than 0"),
    (LOAD, "load X=x_ptr[M, N - 2 * N]", "x_ptr[M, N - 2 * N]", "never more than 0"),
)
DESCRIPTORS = lies(
    PERSISTENT,
    ("c_desc.store([offs_am, offs_bn]", "c_desc.store([offs_bn, offs_am]", "store C=", "blocks of M"),
    ("a_desc.load([offs_am, depth])", "a_desc.load([offs_am + K, depth])", "load A=", "along M"),
    ("a_desc.load([offs_am, depth])", "a_desc.load([tile_id, depth])", "load A=", "a program id"),
    call=NUMBERED | {"BLOCK_N": 16} | SHAPES,
)
CALLS = [
    Lie(MATMUL, (), "load A=", "the blocks of M are 32 apart", STRIDED | {"stride_am": 128}),
    Lie(MATMUL, (), "load A=", "apart in its address", STRIDED | {"stride_am": 1, "stride_ak": 96}),
    Lie(MATMUL, (), "store C=", "apart in its address", STRIDED | {"stride_cm": 1, "stride_cn": 96}),
    Lie(SCALE, ((ROWS, "    rows = pid_m * 32 + tl.arange(0, 32)\n"),), LOAD, "the blocks of M are 32 apart", SIZED),
    Lie(SCALE, ((ROWS, "    rows = pid_m * BLOCK_M + tl.arange(0, 8)\n"),), STORE, "a tile stores [0:8]", SIZED),
    Lie(
        SCALE,
        (("N, BLOCK_M", "N, FIRST, BLOCK_M"), (ROWS, ROWS[:-1] + " + FIRST\n")),
        LOAD,
        "along M it reaches elements 3 to 18",
        SIZED | {"FIRST": 3},
    ),
    Lie(NORM, (), "store OUT=", "a tile stores [0:1], [0:32]", {"ROWS": 9, "COLS": 40, "BLOCK": 32}),
    Lie(
        PERSISTENT,
        (),
        "load A=",
        "elements 0 to 31 of a block of 16",
        NUMBERED | {f"{name}_desc.block_shape[{at}]": size for name in "abc" for at, size in ((0, 32), (1, 16))},
    ),
]
QUOTIENTS = lies(
    alone("quotients"),
    (" & (h[None, :] < half)", "", "load X=", "those after it belong to other rows"),
    (" (h[None, :] < half)", " (h[None, :] < N)", "load X=", "those after it belong to other rows"),
    ("half + h[None, :], mask=here", "half + 1 + h[None, :], mask=here", "load X=", "it reaches 23 to 54"),
    ("a * b, mask=here", "a * b, mask=rows[:, None] < M", "store Y=", "of 22 elements of a dimension it stores"),
    call={"M": 96, "N": 44, "BM": 16, "H": 32},
)
ALL = [*QUOTIENTS, *PLACES, *CONDITIONS, *NUMBERS, *STREAMS, *SOFTMAX, *DIRECTIVES, *DESCRIPTORS, *CALLS]

"""The test kernels as the compiler and the lint are given them: small tiles, so that their PTX can be read."""

from __future__ import annotations

import re
from typing import Any

from tests.compiler import kernels_protocol as kernels
from tools.aot import Source
from tools.ptx_lint.contract import Contract, Guard

TILE = {"BM": 64, "BN": 64, "BK": 64}
LAUNCH = {"num_warps": 4, "num_stages": 3}
_MATMUL = {"a_desc": "tensordesc<bf16[64,64]>", "b_desc": "tensordesc<bf16[64,64]>", "y": "*bf16", "signals": "*i32"}
_SHAPE = {"m": "i32", "n": "i32", "k": "i32", "tiles_n": "i32"}
_SPIN = {"abort": "*i32", "epoch": "i32", "timeout_ns": "i64"}


def aligned(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 16)


def matmul_waits() -> Source:
    signature = _MATMUL | _SPIN | _SHAPE | {"claims": "*i32"}
    return Source(kernels.matmul_waits, signature, TILE, aligned("y", "n"), LAUNCH, "waits")


def matmul_notifies(bulk: bool = False, barrier: bool = True, drains: bool = True, scope: str = "sys") -> Source:
    constexprs = TILE | {"BULK": bulk, "BARRIER": barrier, "DRAINS": drains, "SCOPE": scope}
    signature = _MATMUL | _SHAPE | {"y_desc": "tensordesc<bf16[64,64]>"}
    return Source(
        kernels.matmul_notifies, signature, constexprs, aligned("y", "n"), LAUNCH, "bulk" if bulk else "store"
    )


def reduce_waits(wait: str = "bounded") -> Source:
    signature: dict[str, str] = {"slots": "*bf16", "own": "*bf16", "y": "*bf16", "signals": "*i32", **_SPIN}
    signature |= {"rows": "i32", "cols": "i32", "slot_size": "i64"}
    constexprs = {"W": 3, "BLOCK": 1024, "WAIT": wait}
    names = aligned("slots", "own", "y", "signals", "cols", "slot_size")
    return Source(kernels.reduce_waits, signature, constexprs, names, {"num_warps": 4}, wait)


def begin() -> Source:
    signature = {"own_pad": "*i32", "peer_credits": "*i64", "own_credits": "*i32", "abort": "*i32"}
    signature |= {"timeout_ns": "i64", "signals": "i32"}
    return Source(kernels.begin, signature, {"BLOCK": 128, "W": 3}, aligned("own_pad"), {"num_warps": 4}, "three ranks")


def sounds() -> Source:
    signature = {"slots": "*fp32", "y": "*fp32", "signals": "*i32", "words": "*i32", "limits": "*i64", "epoch": "i32"}
    signature |= {"timeout_ns": "i64", "world_size": "i32"}
    names = aligned("slots", "y", "signals", "words", "limits")
    return Source(kernels.sounds, signature, {"SIZE": 128}, names, {"num_warps": 4}, "a void wait")


def spills(registers: int) -> Source:
    options = {"num_warps": 4, "maxnreg": registers}
    return Source(kernels.spills, {"x": "*fp32", "y": "*fp32"}, {"SIZE": 128}, aligned("x", "y"), options, "spills")


REDUCES = Contract(waits=1, guarded=(Guard("signals", ("slots",)),), alarm=("abort",))
WAITS = Contract(
    waits=1, guarded=(Guard("signals", ("a_desc",)),), alarm=("abort",), claims=("claims",), wgmma=True, depth=1
)
NOTIFIES = Contract(releases=1, announced=(Guard("signals", ("y", "y_desc")),), wgmma=True, depth=1)
BEGINS = Contract(
    waits=1,
    releases=1,
    unrolls=(2,),
    guarded=(Guard("own_credits", ()),),
    announced=(Guard("*peer_credits", ("own_pad",)),),
    alarm=("abort",),
)
SOUNDS = Contract(waits=1, guarded=(Guard("signals", ("slots",)),), alarm=("words", "*limits"))
# Kept as text in tests/golden/compiler, so that the rules can be tested without a compiler: the PTX of this Triton.
KEPT_FROM = (3, 6)
KEPT: dict[str, tuple[Source, Contract]] = {
    "matmul_waits": (matmul_waits(), WAITS),
    "matmul_stores": (matmul_notifies(), NOTIFIES),
    "matmul_bulk": (matmul_notifies(bulk=True), NOTIFIES),
    "reduce_waits": (reduce_waits(), REDUCES),
    "begin": (begin(), BEGINS),
    "sounds": (sounds(), SOUNDS),
}


def bare(ptx: str) -> str:
    """PTX without debug information and comments, one instruction a line."""
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*\n|//[^\n]*|^\$L__(tmp|func)\w*:\n", "", ptx, flags=re.M)
    text = text[: text.rindex("ret;")] + "ret;\n}\n"
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines() if line.strip())


def edit(text: str, *changes: tuple[str, str] | tuple[str, str, int]) -> str:
    """Applies regular-expression replacements, at most `count` times each; every one must change something."""
    for change in changes:
        pattern, replacement, *count = change
        text, found = re.subn(pattern, replacement, text, count=count[0] if count else 0, flags=re.S)
        assert found, f"nothing in the kernel looks like {pattern}"
    return text


def rules(findings: Any) -> set[str]:
    return {finding.rule for finding in findings}

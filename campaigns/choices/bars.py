"""Acceptance limits of the dense operators' times on four ranks in bf16, as data: a quantity, the cases, the limits.

`campaigns.acceptance` holds result files against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

# of_ceiling: our time / that of a matmul beside copies. beyond_ceiling_us: our time - that. of_communication: ours /
# that of communication alone, by NCCL or the copy engine. efficiency: of overlap. against_...: speedup over cuBLAS and
# NCCL in sequence, over torch's fused operator, over the fastest of all baselines.
Quantity = Literal[
    "of_ceiling", "beyond_ceiling_us", "of_communication", "efficiency",
    "against_library", "against_torch", "against_best",
]  # fmt: skip


class Cases(Struct, frozen=True, kw_only=True):
    """The cases of a bar. shapes: a pattern of how names begin. least_m, most_m: rows. link_bound: None for all."""

    label: str
    shapes: str = ""
    least_m: int = 0
    most_m: int | None = None
    link_bound: bool | None = None


class Bar(Struct, frozen=True, kw_only=True):
    """A limit that the mean of a number over cases, and each of them, must keep. None: no such limit."""

    of: Quantity
    cases: Cases
    mean: float | None = None
    each: float | None = None


MLP = Cases(label="mlp", shapes="MLP-")
MANY_ROWS = Cases(label="1,024 rows on", least_m=1024)
LINK_BOUND = Cases(label="where the link is the bound", link_bound=True)
# Limits of both operators with row shards against torch and NCCL.
SHARDED = (Bar(of="against_torch", cases=MANY_ROWS, mean=1.12), Bar(of="against_library", cases=MLP, mean=1.3))

_NO_MLP = "(?!MLP-)"
_MANY_ROWS = Cases(label="other shapes of 4,096 rows on", shapes=_NO_MLP, least_m=4096, link_bound=False)
_FEW_ROWS = Cases(label="fewer rows", shapes=_NO_MLP, most_m=4095, link_bound=False)
_LAYERS = r"Llama-3-(8B|70B)\.(o|down)\."  # where an all-reduce follows a matmul
_PREFILL = Cases(label="1,024 to 8,192 tokens", shapes=_LAYERS, least_m=1024, most_m=8192)
_DECODING = Cases(label="1 to 256 tokens", shapes=_LAYERS, most_m=256)

BARS: Mapping[str, tuple[Bar, ...]] = {
    all_gather_matmul.OPERATOR.name: (
        Bar(of="of_ceiling", cases=MLP, mean=1.03, each=1.05),
        Bar(of="efficiency", cases=MLP, mean=0.88, each=0.8),
        Bar(of="of_ceiling", cases=_MANY_ROWS, mean=1.04),
        Bar(of="beyond_ceiling_us", cases=_FEW_ROWS, each=12.0),
        Bar(of="of_communication", cases=LINK_BOUND, each=1.12),
        *SHARDED,
    ),
    matmul_reduce_scatter.OPERATOR.name: (
        Bar(of="efficiency", cases=MLP, mean=0.83, each=0.75),
        Bar(of="of_communication", cases=LINK_BOUND, each=1.25),
        *SHARDED,
    ),
    matmul_all_reduce.OPERATOR.name: (
        Bar(of="against_library", cases=_PREFILL, mean=1.4),
        Bar(of="against_best", cases=_DECODING, mean=1.15),
    ),
}

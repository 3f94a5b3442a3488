"""Acceptance limits of an operator's times on four ranks in bf16, as data: a quantity, the cases, the limits.

`campaigns.acceptance` holds result files against the bars of each operator's record.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

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

"""Schedules and options that are gone: what a caller is told, and what is skipped in files that were measured."""

from __future__ import annotations

from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

_AG, _RS, _AR = (each.OPERATOR.name for each in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce))
# With the method that does their work: no shipped table had a row that any of them won.
REPLACED: dict[str, str] = {
    f"{_AG}.gather": "per_shard",
    f"{_AG}.gather_pull": "gather_packed",
    f"{_RS}.pull": "scatter_pull",
    f"{_RS}.ring": "fused_ring",
    f"{_AR}.one_shot": "one_shot_packed",
    f"{_AR}.one_shot_pull": "one_shot_packed",
    f"{_AR}.two_shot_pull": "two_shot",
    f"{_AR}.two_shot_stored": "ring_stored",
}
REPLACED_OPTIONS = ("sharing",)  # of rows in files that were measured with it

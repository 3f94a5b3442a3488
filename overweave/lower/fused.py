"""Placements that an operator of the catalog serves: its plan, whose tiles run beside what travels."""

from __future__ import annotations

from collections.abc import Mapping

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import names
from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.lower.layouts import Placements, RankMesh
from overweave.lower.work import MatmulOp, machine_of
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.record import LoweringPath

# Placements of x, w and y along one mesh dimension -> the operator, and the size that ranks share out.
SERVED = {
    ("S0", "S1", "S1"): (all_gather_matmul.OPERATOR.name, "n"),
    ("S1", "S0", "S0"): (matmul_reduce_scatter.OPERATOR.name, "k"),
    ("S1", "S0", "R"): (matmul_all_reduce.OPERATOR.name, "k"),
}


def fused_plan(
    op: MatmulOp, mesh: RankMesh, path: LoweringPath, placed: Mapping[str, Placements]
) -> tuple[Plan, tuple[str, str]] | None:
    """Return the plan of an operator, with its name and what `plan=` takes; None where none serves the placements, the
    sizes or the machine."""
    if len(mesh.shape) > 1 or op.slices != (1, 1):
        return None
    operator, split = SERVED.get((placed["x"][0], placed["w"][0], placed["y"][0]), ("", ""))
    method = next((method for method in methods_for(operator) if method.lowering == path), None)
    if method is None:
        return None
    links = machine_of(mesh).name if method.takes("links") else ""
    whole = {"n": op.n, "k": op.k}
    if (links and links not in names()) or whole[split] % mesh.ranks:
        return None
    whole[split] //= mesh.ranks
    problem = Problem(operator=operator, m=op.m, n=whole["n"], k=whole["k"], world_size=mesh.ranks, dtype=op.dtype)
    options = {"links": links} if links else {}
    try:
        plan = build(method.full_name, problem, options)
        verify_plan(plan, MachineLimits()).raise_if_refused()
    except (InputError, ScheduleError):  # rows that its kernel does not load
        return None
    return plan, (operator, " ".join([method.name, *(f"{name}={value}" for name, value in options.items())]))

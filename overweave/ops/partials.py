"""What the operators that end with a sum over ranks ask of their operands: each rank's part of the reduced axis."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.plan import Problem
from overweave.memory.group import Group
from overweave.ops.arguments import check_operands
from overweave.ops.epilogue import Extras, checked_epilogue
from overweave.ops.scales import FP8, TAKEN, name_of


def problem_of_partials(
    operator: str, x: torch.Tensor, w: torch.Tensor, group: Group, extras: Extras | None
) -> Problem:
    """The problem of `sum over ranks of x @ w`, of operands as the operators take them. Raises InputError."""
    is_transposed = check_operands(operator, x, w, dtypes=TAKEN)
    if getattr(extras, "gate", None) is not None:
        found = "a gate beside products that are parts of a sum"
        raise InputError(f"{operator}: extras", found, "Only all_gather_matmul has a gate: finish the sum yourself")
    problem = Problem(
        operator=operator,
        m=x.shape[0],
        n=w.shape[1],
        k=x.shape[1],
        world_size=group.world_size,
        dtype=name_of(x.dtype),
        b_is_transposed=is_transposed,
    )
    epilogue = checked_epilogue(operator, extras, problem.result_rows(group.rank), (x, w))
    out_dtype = name_of(extras.scales.result_dtype(x)) if extras and x.dtype == FP8 else None
    return replace(problem, epilogue=epilogue, out_dtype=out_dtype)

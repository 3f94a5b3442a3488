"""What happens to a sum where a library summed, or the emulation: the epilogue of a collective's, and the RMSNorm of
whole rows, by torch's own operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional

from overweave.ir.epilogue import NORM_WEIGHT, RESIDUAL, Norm, Z
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Copy, Operation, Reduce
from overweave.runtime.library.epilogue import end_collective
from overweave.runtime.library.library import View, without_autocast


def finish_sum(operation: Operation, problem: Problem, view: View, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the problem's epilogue or norm does to rows of `y` that an operation has just stored as sums; nothing for
    others, nor for sums that were given their epilogue before they were rounded.

    `tensors` are the caller's, the weight as `[n]` or `[1, n]`.
    """
    end_collective(operation, problem, view, tensors)
    if problem.norm is None or not _sums(operation, problem):
        return
    for out in operation.writes:
        if out.buffer == "y" and not out.is_empty:
            apply_norm(view(out), slice(*out.rows), problem.norm, tensors)


def apply_norm(y: torch.Tensor, rows: slice, norm: Norm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Rows `rows` of a sum, which `y` holds, to `z` and, normed, back to `y`. Each step rounds, as torch does."""
    z, weight = tensors[Z][rows], tensors[NORM_WEIGHT].view(-1)
    z.copy_(y + tensors[RESIDUAL][rows] if norm.residual else y)
    with without_autocast():
        y.copy_(functional.rms_norm(z, (z.shape[1],), weight, norm.eps))


def _sums(operation: Operation, problem: Problem) -> bool:
    """Whether an operation leaves whole sums behind, its own or others'; of a group of one, products are."""
    return isinstance(operation, Reduce | Copy | Collective) or (
        isinstance(operation, Compute) and problem.world_size == 1
    )

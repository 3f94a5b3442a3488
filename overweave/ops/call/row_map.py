"""Which rows of the whole a rank's result has, where a plan that was asked for by name deals them in strips."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.problem import Problem

RETURNS_MAP = "rows=cyclic"  # among the words of a plan
ROWS, ROWS_OF_ALL = "rows", "rows_of_all"  # among the tensors of a call


class RowMap(NamedTuple):
    """Row `i` of a rank's result is row `rows[i]` of the whole. Both are int64, and lie where the result does.

    `residual[map.rows]` are the rows of another tensor of the whole that belong to the result's. rows_of_all: the rows
    of all ranks, one rank behind the other.
    """

    rows: torch.Tensor
    rows_of_all: torch.Tensor

    def restore(self, gathered: torch.Tensor) -> torch.Tensor:
        """The whole in its order, from the results of all ranks, one behind the other, as an all-gather leaves them.

        Raises InputError for another number of rows.
        """
        if gathered.dim() == 0 or len(gathered) != len(self.rows_of_all):
            found, rows = f"a tensor of shape {list(gathered.shape)}", len(self.rows_of_all)
            raise InputError("restore rows", found, f"Pass the {rows} rows of all ranks, one rank behind the other")
        return torch.empty_like(gathered).index_copy_(0, self.rows_of_all, gathered)


def maps_of(problem: Problem, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of the map, of a problem whose rows are dealt in strips."""
    rows = [[row for part in problem.result_ranges(one) for row in range(*part)] for one in range(problem.world_size)]
    of_all = torch.tensor([row for one in rows for row in one], dtype=torch.int64, device=device)
    first = sum(map(len, rows[:rank]))
    return {ROWS: of_all[first : first + len(rows[rank])], ROWS_OF_ALL: of_all}


def refuse_maps(operator: str, plan: object) -> None:
    """Raises InputError for a plan that returns a map, where what is differentiated, cast or compiled has no place for
    one: gradients would be those of other rows."""
    if isinstance(plan, str) and RETURNS_MAP in plan.split():
        found = "it returns other rows, with their map, and an op of torch's dispatcher has neither"
        cure = "Call it under torch.no_grad(), without compiler, tracer and autocast, or leave rows=cyclic out"
        raise InputError(f"{operator} with plan {plan[:80]!r}", found, cure)

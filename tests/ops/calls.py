"""Calls of the operators by every rank of a group, and whether each gave back the exact result."""

from __future__ import annotations

from functools import partial

import torch

from campaigns.exact.calls import Case, Inputs, results
from campaigns.exact.exactness import Data, make_data
from overweave.memory.group import Group, resolve
from overweave.ops.call.groups import GroupLike

small_call = partial(Case, n=24, k=16, dtype=torch.float32)  # of an operator and a number of rows


def data_of(case: Case, rank: int, world_size: int, turn: int = 0) -> Data:
    """A rank's part of a call."""
    return make_data(case.problem(world_size), rank, case.m + turn)


def run(case: Case, x: torch.Tensor, w: torch.Tensor, group: GroupLike = None) -> tuple[torch.Tensor, ...]:
    """What the operator gives back: y, and the gathered input if it was asked for."""
    return results(case, Inputs(x, w, x), group)


def is_right(case: Case, turn: int = 0, group: GroupLike = None) -> bool:
    """Runs the call with integers, different ones every turn; every bit must be that of the exact result."""
    own: Group = resolve(group)
    data = data_of(case, own.rank, own.world_size, turn)
    y, *gathered = run(case, data.x, data.w, group)
    if gathered:
        shards = [data_of(case, rank, own.world_size, turn).x for rank in range(own.world_size)]
        if not torch.equal(gathered[0], torch.cat(shards)):
            return False
    return y.shape == data.exact.shape and torch.equal(y, data.exact.to(y.dtype))

"""Calls of the operators as data: what a rank passes, what must come back, and whether it did."""

from __future__ import annotations

from typing import NamedTuple

import torch

import overweave as ow
from campaigns.cases import ALL_GATHER, ALL_REDUCE
from campaigns.exact.exactness import Case, make_data
from overweave.ir.dtype import Dtype
from overweave.ir.problem import Problem
from overweave.memory.group import Group, resolve
from overweave.ops.call.groups import GroupLike


class Call(NamedTuple):
    """One call of an operator by every rank of a group."""

    operator: str
    m: int
    dtype: Dtype = "float32"
    plan: str | None = None
    b_is_transposed: bool = False
    returns_gathered: bool = False
    n: int = 24
    k: int = 16

    def case(self, world_size: int) -> Case:
        """The data of the call."""
        problem = Problem(
            operator=self.operator,
            m=self.m,
            n=self.n,
            k=self.k,
            world_size=world_size,
            dtype=self.dtype,
            b_is_transposed=self.b_is_transposed,
        )
        return Case(self.operator, problem, {}, seed=self.m)


def run(call: Call, x: torch.Tensor, w: torch.Tensor, group: GroupLike = None) -> tuple[torch.Tensor, ...]:
    """What the operator gives back: y, and the gathered input if it was asked for."""
    if call.operator == ALL_GATHER and call.returns_gathered:
        return ow.all_gather_matmul(x, w, group, m=call.m, return_gathered=True, plan=call.plan)
    if call.operator == ALL_GATHER:
        return (ow.all_gather_matmul(x, w, group, m=call.m, plan=call.plan),)
    reduced = ow.matmul_all_reduce if call.operator == ALL_REDUCE else ow.matmul_reduce_scatter
    y = reduced(x, w, group, plan=call.plan)
    assert isinstance(y, torch.Tensor)
    return (y,)


def is_right(call: Call, turn: int = 0, group: GroupLike = None) -> bool:
    """Runs the call with integers, different ones every turn; every bit must be that of the exact result."""
    own: Group = resolve(group)
    case = call.case(own.world_size)
    data = make_data(case, own.rank, is_integer=True, call=turn)
    y, *gathered = run(call, data.x, data.w, group)
    if gathered:
        shards = [make_data(case, rank, is_integer=True, call=turn).x for rank in range(own.world_size)]
        if not torch.equal(gathered[0], torch.cat(shards)):
            return False
    return y.shape == data.exact.shape and torch.equal(y, data.exact.to(y.dtype))

"""Calls of the operators as data: what a rank passes, what must come back, and whether it did."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

import overweave as ow
from campaigns.cases import ALL_GATHER, ALL_REDUCE
from campaigns.exact.exactness import Case, make_data
from overweave.ir.dtype import Dtype
from overweave.ir.problem import Problem
from overweave.memory.group import Group, resolve
from overweave.ops.call.groups import GroupLike

ALIGNED = {"n": 24, "k": 16}  # what tile kernels take in every dtype
RAGGED = {"n": 13, "k": 9}
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


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


def wrong_calls(calls: list[Call]) -> list[str]:
    """For `run_ranks`: the calls that were wrong on this rank, each made twice."""
    return [f"{call} turn {turn}" for call in calls for turn in range(2) if not is_right(call, turn)]


def rows(world_size: int) -> list[int]:
    """None, one, fewer than ranks, as many, ragged, a prime, even."""
    return sorted({0, 1, world_size - 1, world_size, 2 * world_size + 1, 37, 16 * world_size})


def calls_of_any_size(operator: str, world_size: int, seed: int) -> list[Call]:
    """Every number of rows without naming a plan; dtypes, layouts and ragged extents as they fall."""
    chance = random.Random(seed)
    return [
        Call(
            operator,
            m,
            dtype=chance.choice(DTYPES),
            b_is_transposed=chance.random() < 0.5,
            returns_gathered=operator == ALL_GATHER and chance.random() < 0.5,
            **chance.choice((ALIGNED, RAGGED)),
        )
        for m in rows(world_size)
    ]


def calls_by_plan(operator: str, plans: tuple[str, ...], m: int, dtypes: tuple[Dtype, ...]) -> list[Call]:
    """Every plan in every given dtype, in both layouts."""
    return [
        Call(operator, m, dtype, plan, b_is_transposed)
        for plan in plans
        for dtype in dtypes
        for b_is_transposed in (False, True)
    ]

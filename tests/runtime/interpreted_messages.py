"""Packed messages, interpreted: real kernels and real flags between processes. Run by test_interpreter.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.ir.shards import shard_rows  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

PLANS = (
    "matmul_all_reduce.one_shot_packed",
    "all_gather_matmul.gather_packed",
    "matmul_all_reduce.two_shot_packed",
    "matmul_reduce_scatter.scatter_packed",
)
SHAPES = ((1, 8, "bfloat16"), (37, 40, "bfloat16"), (3, 24, "float32"), (5, 8, "float16"), (0, 8, "bfloat16"))


def run_packed(calls: int, shapes: int) -> list[str]:
    """Messages that carry their flag: of all operators, other sizes and plans with slots between, memory that grows."""
    group, wrong = resolve(None), []
    cases = []
    for (m, n, dtype), name in product(SHAPES[:shapes], PLANS):
        # k is what a gather moves
        shape = {"m": m, "n": n, "k": n + 8, "world_size": group.world_size, "dtype": dtype}
        problem = Problem(operator=name.split(".")[0], **shape)
        is_ours = name.endswith("packed") and (m == 0 or (m, dtype) == (37, "bfloat16"))
        multipliers = ("library", "skinny") if is_ours else ("library",)
        for matmul in multipliers:
            options = {"matmul": matmul} if matmul != "library" else {}
            cases.append((Case(name, problem, options, seed=m), catalog.build(name, problem, options)))
    for call in range(calls):
        for case, plan in cases:
            data = make_data(case, group.rank, is_integer=True, call=call)
            found = compute(case, plan, group, data, "interpreter")
            if not torch.equal(found, data.exact.to(found.dtype)):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.parametrize(("world_size", "calls", "shapes"), [(1, 1, 9), (2, 4, 9), (3, 2, 9), (4, 2, 1), (8, 1, 1)])
def test_packed_messages_are_exact(world_size: int, calls: int, shapes: int):
    assert run_ranks(run_packed, world_size, calls, shapes, timeout_s=120) == [[]] * world_size


def run_gathered(m: int) -> list[str]:
    """What was gathered is the caller's, if he asks for it, and several weights are multiplied by it."""
    group, wrong = resolve(None), []
    shape = {"m": m, "n": 24, "k": 16, "world_size": group.world_size, "dtype": "bfloat16", "columns": (8, 16)}
    problem = Problem(operator="all_gather_matmul", returns_gathered=True, **shape)
    plan = catalog.build("all_gather_matmul.gather_packed", problem, {})
    torch.manual_seed(3)
    x = torch.randint(-1, 2, (m, 16)).bfloat16()
    weights = [torch.randint(-1, 2, (16, cols)).bfloat16() for cols in (8, 16)]
    own = x[slice(*shard_rows(m, group.world_size, group.rank))].contiguous()
    for call in range(3):
        outputs = {"y": torch.empty(m, 8), "y.1": torch.empty(m, 16), "gathered_out": torch.empty(m, 16)}
        outputs = {name: torch.full_like(one, torch.nan, dtype=torch.bfloat16) for name, one in outputs.items()}
        run_on_host(plan, group, {"x": own, "w": weights[0], "w.1": weights[1]}, outputs, depth="interpreter")
        wanted = (x @ weights[0], x @ weights[1], x)
        if not all(torch.equal(found, right) for found, right in zip(outputs.values(), wanted, strict=True)):
            wrong.append(f"m={m} call {call}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_was_gathered_is_returned(world_size: int):
    for m in (1, 7):
        assert run_ranks(run_gathered, world_size, m) == [[]] * world_size

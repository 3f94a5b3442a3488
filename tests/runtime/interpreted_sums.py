"""Sums that are made on the way, told to all who read them, or stored where they belong: actual kernels, interpreted.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.problem import Problem  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.host import run_on_host  # noqa: E402
from overweave.schedules.catalog import catalog  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host interpreter")  # here, once, and not in every rank

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
TILES: dict[str, int | str] = {"block_m": 16, "block_n": 64, "pieces": 2}
HALF = {"block_n": 128, "split_n": 2, "sms": 6}


def run_sums(plan: str, problems: list[tuple[int, dict[str, int | str]]], calls: int) -> list[str]:
    """Empty shards, empty and short pieces, half tiles."""
    return run_plan(f"{SCATTER}.{plan}", [(m, TILES | options) for m, options in problems], calls)


def run_plan(plan: str, problems: list[tuple[int, dict[str, int | str]]], calls: int) -> list[str]:
    """What is wrong in calls of a plan, if anything: with so many rows, and these options."""
    group, wrong = resolve(None), []
    for m, options in problems:
        operator = plan.partition(".")[0]
        problem = Problem(operator=operator, m=m, n=168, k=16, world_size=group.world_size, dtype="bfloat16")
        case = Case(plan, problem, options, seed=m)
        made = catalog.build(case.schedule, problem, case.options)
        for call in range(calls):
            data = make_data(case, group.rank, is_integer=True, call=call)
            if not torch.equal(compute(case, made, group, data, "interpreter"), data.exact.bfloat16()):
                wrong.append(f"{case} call {call}")
    return wrong


def calls_of(world_size: int) -> int:
    """The second call finds the memory as the first one left it; eight interpreted ranks take as long as all others."""
    return 1 if world_size == 8 else 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_sums_that_are_added_at_their_owner_are_exact(world_size: int):
    """Integers are exact in any order. Floats are rounded once, whatever the order."""
    problems = [(1, {}), (70, {"sms": 1})] if world_size in (1, 8) else [(0, {}), (37, {"pieces": 3}), (90, {"sms": 1})]
    assert run_ranks(run_sums, world_size, "remote_add", problems, 2) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_sums_that_travel_round_a_ring_are_exact(world_size: int):
    problems = [(1, {}), (70, HALF)] if world_size in (1, 8) else [(0, {}), (37, {"pieces": 3}), (90, HALF)]
    assert run_ranks(run_sums, world_size, "fused_ring", problems, calls_of(world_size)) == [[]] * world_size


STORED = tuple(f"{SCATTER}.{name}_stored" for name in ("scatter", "ring"))
STORED += (f"{REDUCE}.ring_stored",)
FEW = ((STORED[0], 1), (STORED[2], 1), (STORED[2], 8))  # the rest of W=1 and 8 run by a library


@pytest.mark.parametrize(("plan", "world_size"), [*product(STORED, (2, 3, 4)), *FEW])
def test_tiles_that_are_stored_at_peers_are_exact(plan: str, world_size: int):
    own = [(1, {}), (70, HALF)] if world_size in (1, 8) else [(0, {}), (37, {"pieces": 3}), (90, HALF)]
    problems = [(m, TILES | options) for m, options in own]
    assert run_ranks(run_plan, world_size, plan, problems, calls_of(world_size)) == [[]] * world_size


def bits_of_lost_sums(plan: str, options: dict[str, int | str]) -> list[int]:
    """The bits of sums that are below 0 by less than half of the least fp16."""
    group = resolve(None)
    problem = Problem(operator=REDUCE, m=32, n=32, k=16, world_size=group.world_size, dtype="float16")
    x, w = torch.full((32, 16), -(2.0**-14)).half(), torch.zeros(16, 32).half()
    w[0] = 2.0**-14
    y = torch.full((32, 32), torch.nan).half()
    made = catalog.build(f"{REDUCE}.{plan}", problem, options)
    run_on_host(made, group, {"x": x, "w": w}, {"y": y}, depth="interpreter")
    return y.view(torch.int16).flatten().tolist()


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("two_shot", {"sums": "epilogue"}),
        ("ring_stored", {}),
    ],
)
def test_a_zero_has_the_same_sign_on_every_rank(plan: str, options: dict[str, int | str]):
    """Own sums and those of peers come to `y` by different ways: a move must leave the bits as they are."""
    first, *others = run_ranks(bits_of_lost_sums, 3, plan, {"block_m": 16, "block_n": 32} | options)
    assert others == [first] * 2

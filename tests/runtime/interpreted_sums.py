"""Sums that are made on the way, told to all who read them, or stored where they belong: actual kernels, interpreted.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from overweave.runtime import interpreter

interpreter.repair()

from campaigns.exactness import Case, compute, make_data  # noqa: E402
from overweave.ir.epilogue import Epilogue  # noqa: E402
from overweave.ir.plan import Problem  # noqa: E402
from overweave.ir.shards import shard_rows  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host import run_on_host  # noqa: E402
from overweave.runtime.processes import run_ranks  # noqa: E402
from overweave.schedules import catalog  # noqa: E402

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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_sums_that_are_added_at_their_owner_are_exact(world_size: int):
    """Integers are exact in any order. Floats are rounded once, whatever the order."""
    problems = [(1, {}), (70, {"sms": 1})] if world_size in (1, 8) else [(0, {}), (37, {"pieces": 3}), (90, {"sms": 1})]
    assert run_ranks(run_sums, world_size, "remote_add", problems, 2) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_sums_that_travel_round_a_ring_are_exact(world_size: int):
    problems = [(1, {}), (70, HALF)] if world_size in (1, 8) else [(0, {}), (37, {"pieces": 3}), (90, HALF)]
    assert run_ranks(run_sums, world_size, "fused_ring", problems, 2) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_that_all_ranks_are_told_of_are_exact(world_size: int):
    """One kernel sums, tells and moves; or tells the copy engine, which gets. Some ranks have no rows to sum."""
    pulled = [(1, {"pieces": 1}), (70, {"pieces": 3}), (90, {"pieces": 2})]
    assert run_ranks(run_plan, world_size, f"{REDUCE}.two_shot_pull", pulled, 3) == [[]] * world_size
    got = [(m, {**TILES, "sharing": "get"}) for m in (1, 70)]
    assert run_ranks(run_plan, world_size, f"{REDUCE}.two_shot", got, 2) == [[]] * world_size


def sum_of_floats(plan: str) -> list[int]:
    """The bits of a result in which the order of the sum shows: the first two partials cancel each other, and what is
    added between them is rounded as they are."""
    group = resolve(None)
    problem = Problem(operator=REDUCE, m=20, n=168, k=16, world_size=group.world_size, dtype="bfloat16")
    case = Case(f"{REDUCE}.{plan}", problem, {}, seed=1)
    data = make_data(case, max(group.rank, 1), is_integer=False)
    if group.rank < 2:
        data.x.mul_(2.0**20 * (1 - 2 * group.rank))
    made = catalog.build(case.schedule, problem, case.options)
    return compute(case, made, group, data, "interpreter").view(torch.int16).flatten().tolist()


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_ranks_that_read_their_operands_in_different_orders_add_them_in_one(world_size: int):
    results = [run_ranks(sum_of_floats, world_size, plan) for plan in ("one_shot_pull", "two_shot_pull")]
    assert all(bits == results[0][0] for of_plan in results for bits in of_plan)


STORED = tuple(f"{SCATTER}.{name}_stored" for name in ("scatter", "ring"))
STORED += tuple(f"{REDUCE}.{name}_stored" for name in ("two_shot", "ring"))
FEW = ((STORED[0], 1), (STORED[3], 1), (STORED[1], 8), (STORED[2], 8))  # the rest of W=1 and 8 run by a library


@pytest.mark.parametrize(("plan", "world_size"), [*product(STORED, (2, 3, 4)), *FEW])
def test_tiles_that_are_stored_at_peers_are_exact(plan: str, world_size: int):
    own = [(1, {}), (70, HALF)] if world_size in (1, 8) else [(0, {}), (37, {"pieces": 3}), (90, HALF)]
    problems = [(m, TILES | options) for m, options in own]
    assert run_ranks(run_plan, world_size, plan, problems, 2) == [[]] * world_size


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
        ("two_shot", {"sums": "epilogue", "sharing": "get"}),
        ("two_shot_stored", {}),
        ("ring_stored", {}),
    ],
)
def test_a_zero_has_the_same_sign_on_every_rank(plan: str, options: dict[str, int | str]):
    """Own sums and those of peers come to `y` by different ways: a move must leave the bits as they are."""
    first, *others = run_ranks(bits_of_lost_sums, 3, plan, {"block_m": 16, "block_n": 32} | options)
    assert others == [first] * 2


def gathered_by_a_kernel() -> bool:
    """Whether what a kernel gathers has the bits of what it read, zeros of both signs among it, in fp8."""
    group = resolve(None)
    shape = {"m": 32, "n": 32, "k": 32, "world_size": group.world_size}
    made = []
    for dtype, out_dtype, scaling in (("bfloat16", None, None), ("float8_e4m3fn", "bfloat16", "tensor")):
        problem = Problem(
            operator="all_gather_matmul", dtype=dtype, returns_gathered=True, b_is_transposed=True, **shape,
            epilogue=Epilogue(scaling=scaling), out_dtype=out_dtype,
        )  # fmt: skip
        kind = getattr(torch, dtype)
        x = torch.where(torch.arange(32) % 3 == 0, -0.0, torch.arange(32) % 2).expand(32, 32).to(kind).contiguous()
        own = slice(*shard_rows(32, group.world_size, group.rank))
        inputs = {"x": x[own], "w": torch.ones(32, 32).to(kind).t()}
        inputs |= {"scale_x": torch.ones(1, 1), "scale_w": torch.ones(1, 1)} if scaling else {}
        outputs = {"y": torch.empty(32, 32).bfloat16(), "gathered_out": torch.empty(32, 32).to(kind)}
        run_on_host(catalog.build("all_gather_matmul.gather_pull", problem, {}), group, inputs, outputs, "interpreter")
        made.append(torch.equal(outputs["gathered_out"].view(torch.uint8), x.view(torch.uint8)))
    return all(made)


def test_what_a_kernel_gathers_has_the_bits_that_it_read():
    assert run_ranks(gathered_by_a_kernel, 3) == [True] * 3

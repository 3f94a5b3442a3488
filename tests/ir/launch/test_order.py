"""Launch order: what the host enqueues, and that nothing is enqueued ahead of what it waits for."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from overweave.ir.launch.order import QueueLaunch, launch_order
from overweave.ir.plan import COPY_ENGINE, LIBRARY
from overweave.schedules.catalog.catalog import names
from overweave.schedules.methods.registry import method_of
from tests.plans import plan_of

OPTIONS = {
    "push": ({"pieces": 3, "order": "all_peers"},),
    "scatter": ({"pieces": 3}, {"order": "all_peers"}),
    "two_shot": (
        {"sums": "epilogue"},
        {"sums": "epilogue", "order": "all_peers"},
    ),
}
CASES = [
    (name, options, m) for name in names() for options in ({}, *OPTIONS.get(name.split(".")[1], ())) for m in (1, 700)
]


made = partial(plan_of, m=700, n=256, k=64)


def launched(name: str, rank: int = 1) -> list[str]:
    return [f"{action.queue}: {' '.join(one.name for one in action.operations)}" for action in orders(name, rank)]


def orders(name: str, rank: int) -> tuple[QueueLaunch, ...]:
    takes_pieces = any(option.name == "pieces" for option in method_of(name).options)
    return launch_order(made(name, {"pieces": 1} if takes_pieces else {}), rank)


@pytest.mark.parametrize(("name", "options", "m"), CASES)
def test_everything_is_launched_once_and_behind_its_own_producers(name: str, options: dict[str, str | int], m: int):
    plan = made(name, options, m=m)
    for rank in range(3):
        actions = launch_order(plan, rank)
        order = [operation for action in actions for operation in action.operations]
        mine = list(plan.schedule.of_rank(rank))
        assert sorted(one.name for one in order) == sorted(one.name for one in mine)
        for queue in plan.schedule.queues:
            alike = [[one.name for one in some if one.queue == queue.name] for some in (order, mine)]
            assert alike[0] == alike[1]
        assert not late_producers(actions, rank)


def late_producers(actions: tuple[QueueLaunch, ...], rank: int) -> list[str]:
    """Copies that are launched ahead of a launch of the own rank that notifies what they wait for."""
    told = {
        (notify.pad, notify.signal): position
        for position, action in enumerate(actions)
        for operation in action.operations
        for notify in operation.notifies
        if notify.rank == rank
    }
    return [
        operation.name
        for position, action in enumerate(actions)
        for operation in action.operations
        for wait in operation.waits
        for signal in range(*wait.signals)
        if action.engine == COPY_ENGINE and told.get((wait.pad, signal), -1) >= position
    ]


@pytest.mark.slow
def test_a_kernel_is_one_launch_and_a_library_call_another():
    for name, rank in product(names(), range(3)):
        actions = launch_order(made(name), rank)
        kernels = [action.queue for action in actions if action.engine not in (LIBRARY, COPY_ENGINE)]
        assert len(kernels) == len(set(kernels)), (name, rank)
        assert all(len(action.operations) == 1 for action in actions if action.engine == LIBRARY), (name, rank)


def test_a_late_producer_would_be_seen():
    actions = launch_order(made("matmul_reduce_scatter.scatter", {"pieces": 1}), 1)
    assert late_producers((actions[1], actions[0], *actions[2:]), 1)

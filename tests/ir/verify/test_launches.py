"""What verify asks of launches: that streams and kernels really order what is proven to come before something."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from overweave.ir.plan import Plan
from overweave.ir.schedule import Notify, Operation, Queue, Wait
from overweave.ir.verify.plan import MachineLimits, verify_plan
from tests.plans import plan_of, refused, with_operations, with_schedule

H200 = MachineLimits()
BY_KERNEL = {"mover": "copy_kernel", "block_m": 64, "block_n": 128, "sms": 8}
SCATTER = "matmul_reduce_scatter.scatter"
LARGE = {"m": 1000, "n": 512, "k": 512}


def with_queues(plan: Plan, change: Callable[[Queue], Queue]) -> Plan:
    queues = tuple(map(change, plan.schedule.queues))
    return with_schedule(plan, queues=queues)


def after(plan: Plan, name: str, *others: str) -> Plan:
    return with_queues(plan, lambda queue: replace(queue, after=others) if queue.name == name else queue)


def test_a_copy_engine_is_after_nothing():
    """Its stream waits for signals; no launch makes it wait for a kernel, or for a library call."""
    plan = plan_of("all_gather_matmul.pull", {"block_m": 64, "block_n": 128}, **LARGE)
    assert verify_plan(plan, H200).ok
    refused(after(plan, "copies", "main"), "engine", "queue copies is after main, but a copy_engine starts by signals")


def test_a_kernel_is_after_what_was_launched_before_it():
    """As one launch it starts with its first operation: what stands between that and the others has not been then."""
    plan = after(plan_of("all_gather_matmul.push", {"block_m": 64, "block_n": 128}, **LARGE), "tiles", "copies")

    def between(operations: list[Operation]) -> list[Operation]:
        tiles = [one for one in operations if one.queue == "tiles"]
        return [tiles[0], *(one for one in operations if one.queue != "tiles"), *tiles[1:]]

    schedule = plan.schedule
    operations = tuple(one for rank in range(3) for one in between(list(schedule.of_rank(rank))))
    changed = replace(plan, schedule=replace(schedule, operations=operations))
    refused(changed, "engine", "is after it, but its kernel starts with multiply.0")


def test_a_library_call_cannot_count():
    """It is told of by a word that is set to one, as a copy is."""
    plan = plan_of("all_gather_matmul.pull", {"block_m": 64, "block_n": 128}, **LARGE)
    told = next(one for one in plan.schedule.operations if one.queue == "main" and one.notifies)
    notify = told.notifies[0]

    def counted(one: Operation) -> Operation:
        waits = tuple(Wait(w.pad, w.signals, 2) if _hears(one, w, notify) else w for w in one.waits)
        return replace(one, notifies=(*one.notifies, notify) if one.name == told.name else one.notifies, waits=waits)

    changed = with_operations(plan, map(counted, plan.schedule.operations))
    refused(changed, "replay", "a library sets")


def _hears(one: Operation, wait: Wait, notify: Notify) -> bool:
    return (one.rank, wait.pad) == (notify.rank, notify.pad) and wait.signals[0] <= notify.signal < wait.signals[1]


@pytest.mark.parametrize("name", [SCATTER, "matmul_reduce_scatter.remote_add"])
def test_what_waits_for_peers_is_launched_behind_the_own_pushes(name: str):
    """Sums on another stream than pushes may start first, and hold the SMs that those need, on every rank."""
    options = {key: value for key, value in BY_KERNEL.items() if key != "mover" or name == SCATTER}
    plan = plan_of(name, options, **LARGE)
    assert verify_plan(plan, H200).ok
    queue = next(queue for queue in plan.schedule.queues if queue.name == "sums")
    assert queue.after[-2:] == ("tiles", "copies.kernel")
    refused(after(plan, "sums", "tiles"), "residency", "which is launched behind")

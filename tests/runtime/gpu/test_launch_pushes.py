"""On which streams, and behind what, the kernels of a plan with pushes by SMs are launched. Nothing here runs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from campaigns.oracle.library_queues import gathered_beside, reduced_beside
from overweave.ir.launch.order import launch_order
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import COPY_KERNEL, Plan
from overweave.ir.problem import Problem
from overweave.kernels.copy import copy_kernel
from overweave.memory.cuda import driver
from overweave.memory.layout import lay_out
from overweave.memory.lower import SlotAddresses
from overweave.memory.steps import WaitStep
from overweave.runtime.gpu import bind, launch
from overweave.runtime.gpu.launch import BoundSlot
from overweave.schedules.catalog.catalog import build

MAIN, SIDE = 1, 2
Log = list[tuple[str, int]]


class Event:
    """recorded: on which stream."""

    def record(self, stream: Any) -> None:
        self.recorded = stream.cuda_stream


def plan_of(name: str, **options: int | str) -> Plan:
    problem = Problem(operator=name.split(".")[0], m=1000, n=512, k=512, world_size=3, dtype="bfloat16")
    return build(name, problem, {"mover": "copy_kernel", "copy_programs": 4, "block_m": 64, "block_n": 128} | options)


def launched(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Log:
    """(what, stream) in the order of the host, of one call on rank 1."""
    log: Log = []
    monkeypatch.setattr(driver, "wait_value", lambda stream, address, value: log.append((f"wait {value}", stream)))

    def kernel(name: str) -> Any:
        return lambda stream, addresses=None: log.append((name, stream))

    slot = object.__new__(BoundSlot)
    side, caller = SimpleNamespace(cuda_stream=SIDE), SimpleNamespace(cuda_stream=MAIN)
    caller.wait_event = lambda event: log.append((f"behind {event.recorded}", MAIN))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    slot._plan, slot._traced = plan, False
    slot._workspace = SimpleNamespace(group=SimpleNamespace(rank=1), stream=lambda queue: side)
    slot._addresses = SlotAddresses(plan.schedule, "bfloat16", lay_out(plan.schedule, "bfloat16"), (0, 0, 0, 0))
    slot._own, slot._shapes, slot._waits = {}, {}, SimpleNamespace(of=lambda operation: lambda stream: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(driver, "write_value", lambda stream, address, value: log.append((f"write {value}", stream)))
    monkeypatch.setattr(launch, "library_call", lambda one, *given: lambda tensors: log.append((one.name, SIDE)))
    pushes = len(plan.tile_order(1, pushing_queue(plan)).rows) if plan.realization.copy else 0
    slot._kernels = SimpleNamespace(
        copies_started=WaitStep(7, min(4, pushes)),
        tiles_started=None,
        **{name: kernel(name) for name in ("tiles", "reduce", "copy")},
    )
    actions = launch_order(plan, 1)
    for at, action in enumerate(actions):
        slot._in_order(action, actions[:at])(caller, {}, {})
    return log


def pushing_queue(plan: Plan) -> str:
    return next(one.queue for one in plan.realization.engines if one.engine == COPY_KERNEL)


def test_a_gather_pushes_first_and_tiles_start_when_it_has_its_sms(monkeypatch: pytest.MonkeyPatch):
    """Peers wait for the pushes: nothing that waits for peers may take their place."""
    log = launched(plan_of("all_gather_matmul.push"), monkeypatch)
    assert log == [("copy", SIDE), ("wait 4", MAIN), ("tiles", MAIN)]


def test_a_scatter_pushes_once_its_first_chunk_is_computed(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of("matmul_reduce_scatter.scatter", sms=8, pieces=1)
    tiles = next(put.waits[0].count for put in plan.schedule.of_rank(1) if put.name.startswith("scatter"))
    log = launched(plan, monkeypatch)
    behind_pushes = (f"behind {SIDE}", MAIN)
    assert log == [("tiles", MAIN), (f"wait {tiles}", SIDE), ("copy", SIDE), behind_pushes, ("reduce", MAIN)]


def test_a_scatter_of_one_wave_pushes_behind_it_on_one_stream(monkeypatch: pytest.MonkeyPatch):
    log = launched(plan_of("matmul_reduce_scatter.scatter", pieces=1), monkeypatch)
    assert log == [("tiles", MAIN), ("copy", MAIN), ("reduce", MAIN)]


def test_only_what_runs_beside_has_a_stream_to_join():
    plans = [plan_of("matmul_reduce_scatter.scatter", sms=sms) for sms in (8, 132)]
    beside = [{action.queue for action in launch_order(plan, 0)} & queues_beside(plan) for plan in plans]
    assert beside == [{"copies"}, set()]


def test_a_library_call_beside_tiles_waits_and_tells_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch):
    log = launched(reduced_beside(3), monkeypatch)
    waits = [("wait 2", SIDE), ("reduce.1.0", SIDE), ("wait 2", SIDE), ("reduce.1.1", SIDE)]
    assert log == [("tiles", MAIN), *waits]
    gathers = [("gather.1.0", SIDE), ("write 1", SIDE), ("gather.1.1", SIDE), ("write 1", SIDE)]
    assert sorted(launched(gathered_beside(4, 24), monkeypatch)) == sorted([("tiles", MAIN), *gathers])


@pytest.mark.parametrize(("name", "source"), [("all_gather_matmul.push", "x"), ("matmul_reduce_scatter.scatter", None)])
def test_the_kernel_gets_what_it_takes(name: str, source: str | None, monkeypatch: pytest.MonkeyPatch):
    """source: the caller's tensor, whose address of each call the launch follows."""
    plan, taken = plan_of(name), {}

    def launch(config: Any, arguments: list[Any], tiles: int, traced: bool, adds: bool) -> Any:
        taken.update(zip(copy_kernel.arg_names, [*arguments, None, False, adds, traced], strict=True))
        return lambda stream: taken.update(launched=stream)

    monkeypatch.setattr(bind, "copy_launch", launch)
    kernels = object.__new__(bind.SlotKernels)
    kernels._plan, kernels._rank, kernels._traced, kernels.traces = plan, 1, False, {}
    kernels._addresses = SlotAddresses(plan.schedule, "bfloat16", lay_out(plan.schedule, "bfloat16"), (0, 1 << 30, 0))
    word = torch.zeros(4, dtype=torch.int32)
    kernels._workspace = SimpleNamespace(
        device=torch.device("cpu"), claims=word, limits=word, state=word, group=SimpleNamespace(world_size=3)
    )
    kernels._signals = kernels._words = word
    kernels._example = {"x": torch.zeros(334, 512, dtype=torch.bfloat16), "w": torch.zeros(1, dtype=torch.bfloat16)}
    kernels._slot = SimpleNamespace(view=lambda offset, shape, dtype: torch.zeros(shape, dtype=dtype))
    kernels._copy(pushing_queue(plan))(SIDE, {"x": 4096})
    rows = plan.tile_order(1, pushing_queue(plan)).rows
    queue, words = taken["queue"], taken["protocol"]
    assert (queue.tiles, taken["row_words"], words.world_size) == (len(rows), 512 * 2 // 16, 3)
    assert taken["targets"].shape == (len({row.operation for row in rows}), 2)
    assert queue.table.tolist() == [list(row) for row in rows]
    assert (taken["source"].address == 4096) == (source == "x")
    assert kernels.copies_started == WaitStep(word[2:].data_ptr(), 4)
    assert taken["launched"] == SIDE

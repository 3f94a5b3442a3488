"""The protocol of the slots: a rank that nobody holds back otherwise is held back by credits, and by nothing else."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from overweave.ir.plan import COPY_ENGINE, LIBRARY, EngineAssignment, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    Buffer,
    Copy,
    Credit,
    Goal,
    InitialContents,
    Notify,
    Put,
    Queue,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.memory.group import resolve
from overweave.memory.host.workspace import HostWorkspace
from overweave.runtime.host.host import run_on_host
from overweave.runtime.host.processes import RanksFailed
from tests.clock import slowness
from tests.ranks import run_ranks

ROWS, COLS = 4, 8
CALLS = 12


def region(buffer: str, rank: int) -> Region:
    return Region(buffer, rank, (0, ROWS), (0, COLS))


def one_way(credits: tuple[Credit, ...], delay_us: int) -> Plan:
    """Rank 0 puts `x` to rank 1 and is done; rank 1 copies what arrived to `y`, but rests before it reads."""
    put = Put(
        name="put",
        rank=0,
        queue="copies",
        notifies=(Notify("arrived", 1, 0),),
        sources=(region("x", 0),),
        destinations=(region("staged", 1),),
    )
    read = Copy(
        name="read",
        rank=1,
        queue="main",
        waits=(Wait("arrived", (0, 1), 1),),
        sources=(region("staged", 1),),
        destinations=(region("y", 1),),
        delay_us=delay_us,
    )
    homes = (("x", "input"), ("staged", "symmetric"), ("y", "output"))
    schedule = Schedule(
        name="one_way",
        world_size=2,
        buffers=tuple(Buffer(name, ROWS, COLS, home) for name, home in homes),
        pads=(SignalPad("arrived", 1),),
        queues=(Queue("copies", "complete"), Queue("main", "complete")),
        credits=credits,
        given=(InitialContents(region("x", 0), "a", 0, 0),),
        goal=(Goal(region("y", 1), "a", 0, 0),),
        operations=(put, read),
    )
    engines = (EngineAssignment("copies", COPY_ENGINE), EngineAssignment("main", LIBRARY))
    problem = Problem(operator="one_way", m=ROWS, n=COLS, k=1, world_size=2, dtype="float32")
    return Plan(
        name="one_way", problem=problem, schedule=schedule, realization=Realization(dtype="float32", engines=engines)
    )


def call_often(credits: tuple[Credit, ...], delay_us: int, timeout_s: float = 10.0) -> tuple[int, float]:
    """Wrong results of this rank, and how long the calls took it, the first aside."""
    group, plan, wrong, start_s = resolve(None), one_way(credits, delay_us), 0, 0.0
    for call in range(CALLS):
        if call == 1:
            start_s = time.monotonic()
        x, y = torch.full((ROWS, COLS), float(call)), torch.full((ROWS, COLS), torch.nan)
        run_on_host(plan, group, {"x": x}, {"y": y}, timeout_s=timeout_s)
        wrong += group.rank == 1 and not torch.equal(y, x)
    took_s = time.monotonic() - start_s
    time.sleep(0.2)
    return wrong, took_s


@pytest.mark.slow
def test_a_slot_is_not_rewritten_before_its_reader_is_done():
    (_, sender_s), (wrong, _) = run_ranks(call_often, 2, (Credit(1, 0),), 10_000)
    assert wrong == 0
    assert sender_s > (CALLS - 4) * 10e-3  # held back by the reader


def take_no_credits(delay_us: int) -> None:
    with patch.object(HostWorkspace, "_await_credits"):
        call_often((), delay_us, timeout_s=0.5)  # which what is lost never comes within


@pytest.mark.slow
def test_without_credits_signals_of_later_calls_are_lost():
    with pytest.raises(RanksFailed, match="read waits for arrived"):
        run_ranks(take_no_credits, 2, 10_000)


@pytest.mark.slow
def test_a_call_begins_once_every_peer_has_begun_it():
    # Whatever else runs on the machine may hold either rank up once: not each time.
    assert any(run_ranks(second_call_s, 2, 50_000)[0] > 0.04 for _ in range(5))
    assert any(run_ranks(second_call_s, 2, 0)[0] < 0.04 * slowness() for _ in range(5))


def second_call_s(delay_us: int) -> float:
    """How long rank 0's second call takes while rank 1 still reads the first."""
    group, plan = resolve(None), one_way((Credit(1, 0),), delay_us)
    took_s = 0.0
    for call in range(2):
        start_s = time.monotonic()
        x, y = torch.full((ROWS, COLS), float(call)), torch.zeros(ROWS, COLS)
        run_on_host(plan, group, {"x": x}, {"y": y}, timeout_s=5)
        took_s = time.monotonic() - start_s
        assert group.rank == 0 or torch.equal(y, x)
    time.sleep(0.2)
    return took_s

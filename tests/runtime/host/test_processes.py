"""Ranks as processes: results and errors come back, and nothing outlives its deadline."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch.distributed as dist

from overweave.errors import PeerDied
from overweave.ir.pause_gc import without_collection
from overweave.runtime.host.processes import RankProcesses, RanksFailed, run_ranks
from tests.clock import slowness


def describe(word: str, number: int) -> list[object]:
    return [dist.get_rank(), dist.get_world_size(), dist.get_backend(), word * number]


def test_results_come_in_rank_order():
    assert run_ranks(describe, 3, "ab", 2) == [[rank, 3, "gloo", "abab"] for rank in range(3)]


def raise_on_one() -> str:
    if dist.get_rank() == 1:
        raise PeerDied("asked", "found", "cure")
    return "x" * 1_000_000


@pytest.mark.slow
def test_errors_are_named_and_other_results_kept():
    with pytest.raises(RanksFailed, match=r"rank 1: PeerDied: asked: found\. cure") as caught:
        run_ranks(raise_on_one, 3)
    first, second, third = caught.value.outcomes
    assert (second.error, second.exit_signal) == ("PeerDied", 0)
    assert len(first.value) == len(third.value) == 1_000_000


def die_or_sleep() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.slow
def test_deaths_and_deadlines():
    with RankProcesses(die_or_sleep, 2, group_timeout_s=30.0) as ranks:
        ranks.wait(60, 0)  # however long ranks take to start and to meet on this machine
        start_s = time.monotonic()
        outcomes = ranks.wait(0.5)
        assert time.monotonic() - start_s < 5 * slowness()
    assert [outcome.exit_signal for outcome in outcomes] == [signal.SIGTERM, signal.SIGKILL]


def wait_in_threads(folder: str) -> None:
    threading.Thread(target=sleep_beside, args=(folder,), daemon=True).start()
    Path(folder, "here").touch()
    time.sleep(60)


def sleep_beside(folder: str) -> None:
    Path(folder, "beside").touch()
    time.sleep(60)


@pytest.mark.slow
def test_a_rank_that_is_killed_at_the_deadline_tells_where_it_stood(tmp_path: Path):
    end_s = time.monotonic() + 60
    with RankProcesses(wait_in_threads, 1, str(tmp_path), group_timeout_s=30.0) as ranks:
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        (outcome,) = ranks.wait(0.5)
    assert "had not ended after 0.5 s and was killed" in outcome.message
    assert re.search(r"line \d+ in sleep_beside\n[\s\S]*line \d+ in wait_in_threads\n", outcome.message)


@pytest.mark.slow
def test_a_stopped_rank_is_killed_though_it_cannot_tell():
    with RankProcesses(time.sleep, 1, 60, group_timeout_s=5.0) as ranks:
        ranks.kill(0, number=signal.SIGSTOP)
        (outcome,) = ranks.wait(0.2)
    assert (outcome.exit_signal, outcome.message.endswith("it did not say")) == (signal.SIGKILL, True)


def test_leaving_ends_even_stopped_ranks():
    with RankProcesses(time.sleep, 2, 60, group_timeout_s=5.0) as ranks:
        ranks.kill(1, number=signal.SIGSTOP)
        processes, folder = ranks.processes, ranks._folder
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not Path(folder).exists()


class Witness:
    """In a cycle with itself; tells of its end."""

    ended: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Witness.ended.append(os.getpid())


def collected() -> int:
    gc.collect()
    return Witness.ended.count(os.getpid())


@pytest.mark.slow
def test_a_rank_leaves_its_parents_garbage_alone():
    gc.collect()
    with without_collection():
        Witness()
        assert run_ranks(collected, 1) == [0]
    gc.collect()
    assert Witness.ended == [os.getpid()]

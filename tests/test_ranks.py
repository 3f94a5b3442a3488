"""Ranks that tests share: the same processes serve one test after the other, and none serves after a failure."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.host.processes import RanksFailed
from tests.ranks import run_ranks


def place() -> list[int]:
    return [os.getpid(), dist.get_rank(), dist.get_world_size()]


def test_the_same_processes_serve_groups_of_any_size():
    first, *others = run_ranks(place, 3)
    assert [rank[1:] for rank in (first, *others)] == [[0, 3], [1, 3], [2, 3]]
    assert run_ranks(place, 1) == [[first[0], 0, 1]]
    assert run_ranks(place, 2) == [[first[0], 0, 2], [others[0][0], 1, 2]]


def surroundings() -> list[object]:
    seen: list[object] = [os.environ.get("OVERWEAVE_OF_A_TEST"), float(torch.rand(()))]
    os.environ["OVERWEAVE_OF_A_TEST"] = "changed by a rank"
    dist.barrier(dist.new_group())  # a rank that leaves before its peer has met it breaks the meeting
    return seen


def test_every_use_has_the_environment_of_its_test_and_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch):
    ((before, number),) = run_ranks(surroundings, 1)
    monkeypatch.setenv("OVERWEAVE_OF_A_TEST", "set by a test")
    assert before is None
    assert run_ranks(surroundings, 2) == [["set by a test", number]] * 2


def end_badly(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("of rank 1")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told", "number"),
    [
        ("raises", "rank 1: ValueError: of rank 1", 0),
        ("dies", "rank 1: ended with -15", signal.SIGTERM),
        ("is late", r"had not ended after 0\.5 s and was killed; where it stood:\n[\s\S]*in end_badly", signal.SIGKILL),
    ],
)
def test_no_process_serves_after_a_failure(how: str, told: str, number: int):
    before = run_ranks(place, 2)
    with pytest.raises(RanksFailed, match=told) as caught:
        run_ranks(end_badly, 2, how, timeout_s=60.0 if how != "is late" else 0.5)
    assert caught.value.outcomes[1].exit_signal == number
    after = run_ranks(place, 2)
    assert not {rank[0] for rank in before} & {rank[0] for rank in after}


def test_what_cannot_be_sent_forks_ranks_of_its_own():
    before = run_ranks(place, 2)
    forked = run_ranks(lambda: place(), 2)
    assert [rank[1:] for rank in forked] == [[0, 2], [1, 2]]
    assert not {rank[0] for rank in before} & {rank[0] for rank in forked}

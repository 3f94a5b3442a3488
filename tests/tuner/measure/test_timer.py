from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist

from overweave.errors import InputError
from overweave.tuner.measure.timer import Effort, compare, median
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SHORT = Effort(rounds=4, warmup=2)


@pytest.mark.slow
def test_each_round_holds_every_method_in_rotated_order():
    seen: list[tuple[str, int]] = []
    methods = {name: lambda turn, name=name: seen.append((name, turn)) for name in "abc"}
    samples = compare(methods, CPU, effort=SHORT)
    assert {name: len(values) for name, values in samples.device_us.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = ["".join(name for name, turn in seen if turn == number) for number in range(6)]
    assert rounds == ["abc", "bca", "cab", "abc", "bca", "cab"]


@pytest.mark.slow
def test_times_are_microseconds_of_the_call_alone():
    samples = compare({"slow": lambda turn: time.sleep(0.005), "fast": lambda turn: None}, CPU, effort=SHORT)
    assert 5000 <= median(samples.device_us["slow"]) < 50_000
    assert median(samples.device_us["fast"]) < 1000
    assert samples.host_us == {}


@pytest.mark.slow
def test_rounds_are_reported_and_garbage_is_collected_again():
    told: list[float] = []
    with pytest.raises(ZeroDivisionError):
        compare({"bad": lambda turn: 1 // 0}, CPU, effort=SHORT)
    assert gc.isenabled()
    compare({"a": lambda turn: None}, CPU, effort=SHORT, on_round=told.append)
    assert told == [(turn + 1) / 6 for turn in range(6)]


def test_nothing_to_compare_is_refused():
    with pytest.raises(InputError):
        compare({}, CPU)
    with pytest.raises(InputError):
        compare({"a": lambda turn: None}, CPU, effort=Effort(rounds=0))


def slow_on_rank_1() -> list[float]:
    rank = dist.get_rank()
    samples = compare({"uneven": lambda turn: time.sleep(0.02 * rank)}, CPU, dist.group.WORLD, SHORT)
    return list(samples.device_us["uneven"])


@pytest.mark.slow
def test_the_slowest_rank_counts_on_every_rank():
    first, second = run_ranks(slow_on_rank_1, 2)
    assert first == second
    assert min(first) >= 20_000


def late_on_rank_0() -> list[float]:
    """Rank 0 comes late to every call, in which rank 1 would wait for it."""
    rank = dist.get_rank()

    def on_round(part: float) -> None:
        time.sleep(0.02 * (1 - rank))

    samples = compare({"meet": lambda turn: dist.barrier()}, CPU, dist.group.WORLD, SHORT, on_round)
    return list(samples.device_us["meet"])


@pytest.mark.slow
def test_ranks_start_each_sample_together():
    assert median(run_ranks(late_on_rank_0, 2)[0]) < 15_000

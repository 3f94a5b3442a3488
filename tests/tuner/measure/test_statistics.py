"""Medians and their bounds, timers and the measures of a comparison; and what cutting and overlapping lose, timed."""

from __future__ import annotations

import gc
import math
import random
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.tuner.measure import overlap_losses
from overweave.tuner.measure.bench import Roofs, measure
from overweave.tuner.measure.overlap_losses import loss_names, measured_losses, shrink_to_memory
from overweave.tuner.measure.timer import Effort, compare, geometric_mean, interval_rank, median, p90, paired_ratio
from overweave.tuner.model.overlap_losses import MATMULS
from tests.ranks import run_ranks

TIMES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60)


def test_quantiles_interpolate_between_samples():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert p90(range(11)) == 9
    assert p90([5.0]) == 5.0


def test_geometric_mean_balances_ratios():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 8.0, 1.0]) == pytest.approx(2.0)


def misses(samples: int, skip: int) -> float:
    """Probability that the median lies outside when `skip` samples are left out on each side."""
    return 2 * sum(math.comb(samples, below) for below in range(skip + 1)) / 2**samples


@pytest.mark.parametrize("samples", [6, 10, 30, 31, 50, 100])
def test_the_interval_is_the_narrowest_that_keeps_the_confidence(samples):
    skip = interval_rank(samples)
    assert misses(samples, skip) <= 0.05 < misses(samples, skip + 1)


def test_few_samples_give_their_whole_range():
    ratio = paired_ratio([2.0, 4.0, 3.0], [1.0, 1.0, 1.0])
    assert (ratio.value, ratio.low, ratio.high) == (3.0, 2.0, 4.0)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    source = random.Random(7)
    covered = 0
    for _ in range(400):
        below = [source.lognormvariate(0, 0.3) for _ in range(30)]
        above = [1.25 * value * source.lognormvariate(0, 0.1) for value in below]
        ratio = paired_ratio(above, below)
        covered += ratio.low <= 1.25 <= ratio.high
    assert 0.92 <= covered / 400 <= 0.99


def test_pairing_cancels_what_a_round_has_in_common():
    drift = [1.0 + 0.1 * turn for turn in range(30)]
    ratio = paired_ratio([1.1 * value for value in drift], drift)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.high - ratio.low < 1e-9
    assert ratio.low > 1.0


@given(TIMES)
@settings(deadline=None)  # a busy machine is no failure
def test_a_method_against_itself_is_one(times):
    ratio = paired_ratio(times, times)
    assert ratio.low == ratio.value == ratio.high == 1.0


@pytest.mark.slow
@given(TIMES, st.data())
@settings(deadline=None)  # a busy machine is no failure
def test_the_inverse_ratio_has_the_inverse_interval(times, data):
    others = data.draw(st.lists(st.floats(0.1, 1e6), min_size=len(times), max_size=len(times)))
    forth, back = paired_ratio(times, others), paired_ratio(others, times)
    assert back.low == pytest.approx(1 / forth.high)
    assert back.high == pytest.approx(1 / forth.low)


def test_bad_samples_are_refused():
    with pytest.raises(ValueError, match="no median"):
        median([])
    with pytest.raises(InputError):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="geometric mean"):
        geometric_mean([1.0, -1.0])


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


ROOFS = Roofs(matmul_us=315, communication_us=190, sequential_us=498, ceiling_us=321)


def test_the_ends_of_the_scale():
    assert measure(315, ROOFS).overlap_efficiency == 1.0
    assert measure(498, ROOFS).overlap_efficiency == 0.0
    assert measure(505, ROOFS).overlap_ratio == 0.0
    assert measure(321, ROOFS).ceiling_fraction == 1.0


def test_a_published_row():
    """The sketch of all-gather + matmul 8192x4096x14336: 342 us, efficiency 0.85."""
    assert measure(342, ROOFS).overlap_efficiency == pytest.approx(0.85, abs=0.005)
    assert measure(342, ROOFS).exposed_us == 27


def test_losses_are_negative():
    slower = measure(600, ROOFS)
    assert slower.overlap_efficiency < 0
    assert slower.overlap_ratio < 0


def test_what_cannot_be_said_is_none():
    nothing = measure(100, Roofs(matmul_us=100, communication_us=0, sequential_us=100))
    assert (nothing.overlap_efficiency, nothing.overlap_ratio, nothing.ceiling_fraction) == (None, None, None)


# Measured losses: shapes are scaled until they fit, every cut covers the whole, and on a CPU they can be timed.

SMALL = Problem(operator="all_gather_matmul", m=250, n=32, k=130, world_size=4, dtype="bfloat16")
QUICK = Effort(rounds=1, warmup=0, host_calls=0)


def test_the_longer_side_is_halved_until_all_fits_and_by_what_is_told():
    large = replace(SMALL, m=1 << 20, n=1280, k=8192, world_size=8)
    assert shrink_to_memory(large, 1 << 40) == (large, 1)
    problem, scaled = shrink_to_memory(large, 16 << 30)
    assert (problem.k, problem.m * scaled) == (8192, 1 << 20)
    assert scaled in (2, 4, 8)
    deep, scaled = shrink_to_memory(replace(large, m=8192, k=1 << 20), 8 << 30)
    assert (deep.m, deep.k * scaled) == (8192, 1 << 20)


def test_what_one_gpu_can_measure_is_named():
    assert loss_names(("dil",)) == MATMULS
    assert loss_names(("comm",)) == ()
    beside = loss_names(("cil",))
    assert "matmul beside host copies" in beside
    assert {f"copies on {sms} SMs beside matmul" for sms in (8, 16, 32)} < set(beside)


@pytest.mark.slow
def test_cuts_are_timed_and_compute_the_whole_product():
    factors = measured_losses(SMALL, MATMULS, QUICK)
    assert tuple(factors) == MATMULS
    assert all(factor > 0 for factor in factors.values())
    here = overlap_losses._Here(SMALL, torch.device("cpu"), QUICK)
    whole = here.a.float() @ here.b.float()
    for parts in (4, 16):
        here.out.fill_(float("nan"))
        here.sums.fill_(float("nan"))
        here._by_rows(parts, 0)
        here._by_columns(parts, 0)
        torch.testing.assert_close(here.out.float(), whole, rtol=0.02, atol=0.1)
        torch.testing.assert_close(here.sums, whole, rtol=1e-4, atol=1e-3)

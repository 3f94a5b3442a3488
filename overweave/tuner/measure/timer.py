"""The one timer: several methods, side by side, on every rank of a group at once.

A sample goes like this, on each rank (time runs down; on a CPU the barrier is the group's and the clock the host's):

    stream                          host
    sleep 1 ms                      enqueues everything below while the GPU sleeps
    all-reduce of one number        no rank passes before all have come: ranks start within microseconds
    event: start
    the method                      launches hidden behind the sleep, so this is device time
    event: end                      synchronizes, so that the next sample starts from an idle device

The sleep stands before the barrier: clocks differ from GPU to GPU, and so would the end of a sleep behind it. Methods
of a round run in rotated order. What the host pays is measured apart, in bursts of calls that nobody waits for: few
enough that no queue of the driver fills up, and the median burst counts, so that what happens once does not.
The slowest rank counts: each sample is the largest over ranks.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, median, quantiles
from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from overweave.compat.torch_names import sleep
from overweave.errors import InputError
from overweave.ir.pause_gc import without_collection

# Samples of several methods are taken in rounds, so that slow changes (clocks, heat, other users) affect all methods of
# a round alike. Ratios are therefore formed within rounds, and the interval of their median comes from order
# statistics, without assumptions about the distribution.
# SOURCE: Le Boudec, "Performance Evaluation", 2.2.

__all__ = ["Ratio", "geometric_mean", "interval_rank", "median", "p90", "paired_ratio"]
CONFIDENCE = 0.95


class Ratio(Struct, frozen=True):
    """A median of paired ratios and the interval that holds the true median with 95 % confidence."""

    value: float
    low: float
    high: float


def p90(values: Sequence[float]) -> float:
    """Return the 90th percentile, interpolated between neighbours."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the median of `above[i] / below[i]` over rounds, with its interval."""
    if len(above) != len(below):
        raise InputError(
            "paired_ratio", f"{len(above)} samples against {len(below)}", "Pair samples of the same rounds"
        )
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    skip = interval_rank(len(ratios))
    return Ratio(median(ratios), ratios[skip], ratios[len(ratios) - 1 - skip])


def interval_rank(samples: int) -> int:
    """Return how many of the smallest and of the largest ordered samples lie outside the interval of the median.

    Each sample falls below the median with probability one half, so the count below it is binomial, and leaving out
    `skip` on each side misses the median with twice the probability of at most `skip` below it. With fewer than six
    samples no interval reaches 95 %: then the whole range is returned.
    """
    skip, at_most_skip = 0, 0.5**samples
    while 2 * (at_most_skip + math.comb(samples, skip + 1) * 0.5**samples) <= 1 - CONFIDENCE:
        skip += 1
        at_most_skip += math.comb(samples, skip) * 0.5**samples
    return skip


SampleCall = Callable[[int], object]  # its argument says which input set to use, and grows from sample to sample

SLEEP_CYCLES = 2_000_000  # about 1 ms on Hopper: longer than the host needs to enqueue one sample
BURST_CALLS = 10


class Effort(Struct, frozen=True, kw_only=True):
    """How often to sample. Fewer than 30 rounds are for tests and for tuning: their intervals are wide. warmup: rounds
    before those that count. host_calls: over how many calls, in bursts, host time is measured; 0: not at all."""

    rounds: int = 30
    warmup: int = 5
    host_calls: int = 100


class Samples(Struct, frozen=True):
    """Microseconds by method. device_us: one per round, slowest rank. host_us: of a call, in the median burst. On a CPU
    a call is all host time, and `host_us` is empty."""

    device_us: dict[str, tuple[float, ...]]
    host_us: dict[str, float]


def compare(
    methods: Mapping[str, SampleCall],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    effort: Effort | None = None,
    on_round: Callable[[float], None] | None = None,
) -> Samples:
    """Return samples of every method in paired rounds. Collective: all ranks of `group` pass the same names in one
    order.

    group: None for this process alone. on_round: called after each round, warm-up included, with the fraction done.
    Raises InputError for no methods or no rounds; an error of a method passes through, on this rank only.
    """
    effort = effort or Effort()
    if not methods or effort.rounds < 1:
        raise InputError("compare", f"{len(methods)} methods, {effort.rounds} rounds", "Give at least one of each")
    clock = _CudaClock(device, group) if device.type == "cuda" else _HostClock(group)
    names = list(methods)
    table: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    with without_collection():
        rounds = effort.warmup + effort.rounds
        for sample in range(rounds):
            first = sample % len(names)
            for name in names[first:] + names[:first]:
                elapsed_us = clock.sample_us(methods[name], sample)
                if sample >= effort.warmup:
                    table[name].append(elapsed_us)
            if on_round is not None:
                on_round((sample + 1) / rounds)
        host = {name: clock.host_us(methods[name], effort.host_calls) for name in names}
    slowest = _slowest([*table.values(), [us or 0.0 for us in host.values()]], device, group)
    host_us = dict(zip(names, slowest[-1], strict=True)) if device.type == "cuda" and effort.host_calls else {}
    return Samples(dict(zip(names, slowest, strict=False)), host_us)


class _HostClock:
    """CPU: a call has ended when it returns."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def sample_us(self, call: SampleCall, sample: int) -> float:
        if self._group is not None:
            dist.barrier(self._group)
        start_ns = time.perf_counter_ns()
        call(sample)
        return (time.perf_counter_ns() - start_ns) / 1e3

    def host_us(self, call: SampleCall, calls: int) -> float | None:
        return None


class _CudaClock:
    """CUDA: events on the current stream, which a method must have joined again when it returns."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = device, group
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def _align(self) -> None:
        sleep(SLEEP_CYCLES)
        if self._group is not None:
            dist.all_reduce(self._one, dist.ReduceOp.MAX, self._group)

    def sample_us(self, call: SampleCall, sample: int) -> float:
        torch.cuda.synchronize(self._device)
        self._align()
        self._start.record()
        call(sample)
        self._end.record()
        torch.cuda.synchronize(self._device)
        elapsed_ms: float = self._start.elapsed_time(self._end)
        return elapsed_ms * 1e3

    def host_us(self, call: SampleCall, calls: int) -> float | None:
        if not calls:
            return None
        return median([self._burst_us(call, first) for first in range(0, calls, BURST_CALLS)])

    def _burst_us(self, call: SampleCall, first: int) -> float:
        """Return the host time of each of a few consecutive calls, all ranks at once."""
        self._align()
        torch.cuda.synchronize(self._device)
        start_ns = time.perf_counter_ns()
        for sample in range(first, first + BURST_CALLS):
            call(sample)
        elapsed_ns = time.perf_counter_ns() - start_ns
        torch.cuda.synchronize(self._device)
        return elapsed_ns / BURST_CALLS / 1e3


def _slowest(
    table: list[list[float]], device: torch.device, group: dist.ProcessGroup | None
) -> list[tuple[float, ...]]:
    """Return the largest value over ranks of each entry. Rows may differ in length."""
    flat = torch.tensor([entry for row in table for entry in row], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(flat, dist.ReduceOp.MAX, group)
    entries = iter(flat.tolist())
    return [tuple(next(entries) for _ in row) for row in table]


_R = TypeVar("_R")
SIGHTS = 2  # calls with the same tensors until an eager call becomes a graph (runtime/gpu/replays.py)
MOST_INPUT_SETS = 4  # input sets that samples alternate between
REPLAYED_ROWS = 512  # up to so many rows all methods are timed as captured graphs


def is_replayed(device: torch.device, m: int) -> bool:
    """Whether a problem of `m` rows is timed as captured graphs."""
    return device.type == "cuda" and m <= REPLAYED_ROWS


def with_graph_warmup(effort: Effort, device: torch.device) -> Effort:
    """Return the effort with enough warm-up rounds for our eager calls to become graphs."""
    if device.type != "cuda":
        return effort
    return replace(effort, warmup=max(effort.warmup, SIGHTS * MOST_INPUT_SETS))


def capture_graphs(call: Callable[[int], _R]) -> Callable[[int], _R]:
    """Return the method captured once for each set of inputs, on the current stream's device; a call replays one graph.

    Each set runs before it is captured: nothing may compile, allocate slots, make operands or agree with peers under
    capture. Results of a replay lie where the capture put them, until the next replay of that set. All graphs share one
    memory pool, as in one graph of many layers, so that temporary memory stays in the L2 cache.
    """
    for sample in range(MOST_INPUT_SETS):
        call(sample)
    torch.cuda.synchronize()
    graphs: list[tuple[torch.cuda.CUDAGraph, _R, Callable[[int], _R]]] = []  # the call owns what its graphs address
    for sample in range(MOST_INPUT_SETS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0][0].pool() if graphs else None):
            graphs.append((graph, call(sample), call))
    torch.cuda.synchronize()

    def replay(sample: int) -> _R:
        graph, result, _ = graphs[sample % MOST_INPUT_SETS]
        graph.replay()
        return result

    return replay

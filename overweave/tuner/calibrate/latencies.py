"""Latencies of a call's small steps on GPUs, and bandwidths of element-wise passes, by their names in the machine file.

Times between kernels are differences of the device's own clock, read by one-block kernels; `call` and `kernel` are
differences of whole calls between events. Every number is the mean of the middle half of its samples, on the slowest
rank. Pairs of ranks exchange signals; one rank alone does not. Every wait has a deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from overweave.compat.torch_names import sleep
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.tuner.calibrate import samples
from overweave.tuner.calibrate.samples import POLLS, ROUNDS, WRITES, Bench, Queues
from overweave.tuner.calibrate.single_gpu import medians_us

SAMPLES, WARMUP = 60, 5
ELEMENTS = (2048, 4096)
SPIN, LAUNCHES = 40_000, 8  # cycles of a kernel of known length, and the number of kernels it is cut into


def between_stamps_us(bench: Bench, body: Callable[[int], None]) -> float:
    """Return the time from stamp 0 to stamp 1. Collective."""
    times = []
    for sample in range(WARMUP + SAMPLES):
        bench.align()
        body(sample)
        torch.cuda.synchronize()
        begin, end = bench.stamps[:2].tolist()
        assert end, "a wait ran out of time"
        times.append((end - begin) / 1e3)
    return _middle(times[WARMUP:])


def flag_us(bench: Bench, queue: CopyQueue) -> float:
    """Return the time from a kernel to the flag of a copy queue behind it. Collective."""
    return between_stamps_us(bench, lambda turn: samples.flag_behind_kernel(bench, queue))


def timed_us(bench: Bench, body: Callable[[], None]) -> float:
    """Return the time between events around a call. Collective."""
    times = []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(WARMUP + SAMPLES):
        bench.align()
        begin.record()
        body()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return _middle(times[WARMUP:])


def _middle(times: list[float]) -> float:
    """Return the mean of the middle half, which a coarse clock does not round; the largest over ranks."""
    half = sorted(times)[len(times) // 4 : -(len(times) // 4)]
    slowest = torch.tensor(sum(half) / len(half), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _spins(count: int, cycles: int) -> None:
    for _ in range(count):
        sleep(cycles)


class Raw(NamedTuple):
    """The measured times, in microseconds."""

    one_spin: float
    two_spins: float
    short_spins: float
    pair: float
    begin: float
    write: float
    writes: float
    signalled: float
    launched: float
    launched_by_kernel: float
    passed: float
    passed_by_kernel: float
    join: float
    look: float
    passing: float


def push_points(bench: Bench, queues: Queues, raw: Raw) -> tuple[tuple[int, float], ...]:
    """Return bytes and GB/s of copies to the peer: a copy and its flag behind a kernel, less the same without the
    copy."""
    times = {size: flag_us(bench, queue) - raw.write for size, queue in queues.copies.items()}
    return tuple((size, round(size / max(us, 0.1) / 1e3, 1)) for size, us in times.items())


def measure(bench: Bench, queues: Queues) -> Raw:
    """Return all times. Collective."""
    ping_pong_us = between_stamps_us(bench, lambda turn: samples.ping_pong(bench)) if bench.world_size % 2 == 0 else 0.0
    return Raw(
        one_spin=timed_us(bench, lambda: _spins(1, SPIN)),
        two_spins=timed_us(bench, lambda: _spins(2, SPIN)),
        short_spins=timed_us(bench, lambda: _spins(LAUNCHES, SPIN // LAUNCHES)),
        pair=between_stamps_us(bench, lambda turn: samples.pair(bench)),
        begin=between_stamps_us(bench, lambda turn: samples.begin(bench, turn)),
        write=flag_us(bench, queues.write),
        writes=flag_us(bench, queues.writes),
        signalled=between_stamps_us(bench, lambda turn: samples.signal_to_flag(bench, queues.wait)),
        launched=between_stamps_us(bench, lambda turn: samples.signal_to_kernel(bench, bench.wait_by_stream)),
        launched_by_kernel=between_stamps_us(bench, lambda turn: samples.signal_to_kernel(bench, bench.wait_by_kernel)),
        passed=between_stamps_us(bench, lambda turn: samples.satisfied_wait(bench, bench.wait_by_stream)),
        passed_by_kernel=between_stamps_us(bench, lambda turn: samples.satisfied_wait(bench, bench.wait_by_kernel)),
        join=between_stamps_us(bench, lambda turn: samples.join(bench)),
        look=between_stamps_us(bench, lambda turn: samples.polls(bench)) / POLLS,
        passing=ping_pong_us / (2 * ROUNDS),
    )


def latencies(raw: Raw) -> dict[str, float]:
    """Return the machine file's latencies (overweave/hardware/machine.py describes them). A pair of stamps measures the
    tail of the first kernel and `kernel`. A pass of a ping-pong is `signal` and `observe`."""
    kernel = (raw.short_spins - raw.one_spin) / (LAUNCHES - 1)
    tail = raw.pair - kernel
    flag = (raw.writes - raw.write) / WRITES
    signal = max(0.0, raw.passing - raw.look)
    numbers = {
        "call": 2 * raw.one_spin - raw.two_spins,
        "begin": raw.begin - raw.pair,
        "kernel": kernel,
        "graph": raw.write - tail - flag - raw.look,
        "signal": signal,
        "flag": flag,
        "observe": raw.look,
        "stream_wait": raw.signalled - signal - flag - raw.look,
        "stream_wait, a launch behind it": raw.launched - signal - kernel,
        "stream_wait, a launch behind it, by a kernel": raw.launched_by_kernel - signal - kernel,
        "stream_wait, satisfied": raw.passed - raw.pair,
        "stream_wait, satisfied, by a kernel": raw.passed_by_kernel - raw.pair,
        "join": raw.join - raw.pair,
    }
    return numbers if raw.passing else {name: us for name, us in numbers.items() if name != "signal"}


def element_wise(call_us: float) -> dict[str, float]:
    """Return GB/s that the passes of a sum by torch read and write. call_us: of a call and its kernel, which they take
    too."""
    parts = [torch.randn(ELEMENTS, dtype=torch.float32, device="cuda").bfloat16() for _ in range(8)]
    total, turn = parts[0].float(), itertools.count()
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "widen": (lambda: parts[next(turn) % 8].to(torch.float32, copy=True), 6),
        "add": (lambda: total.add_(parts[next(turn) % 8]), 10),
        "narrow": (lambda: parts[next(turn) % 8].copy_(total), 6),
    }
    calls = [call for call, _ in passes.values()]
    times = zip(passes.items(), medians_us(calls), strict=True)
    return {name: total.numel() * size / (us - call_us) / 1e3 for (name, (_, size)), us in times}

"""What a call's small steps take on GPUs, and passes over elements, as the machine file names them.

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
from overweave.tuner.calibrate.alone import medians_us
from overweave.tuner.calibrate.samples import LOOKS, ROUNDS, WRITES, Bench, Queues

SAMPLES, WARMUP = 60, 5
ELEMENTS = (2048, 4096)
SPIN, LAUNCHES = 40_000, 8  # cycles of a kernel of known length, and into how many it is cut


def stamped_us(bench: Bench, body: Callable[[int], None]) -> float:
    """From stamp 0 to stamp 1. Collective."""
    times = []
    for turn in range(WARMUP + SAMPLES):
        bench.align()
        body(turn)
        torch.cuda.synchronize()
        begin, end = bench.stamps[:2].tolist()
        assert end, "a wait ran out of time"
        times.append((end - begin) / 1e3)
    return _middle(times[WARMUP:])


def behind_us(bench: Bench, queue: CopyQueue) -> float:
    return stamped_us(bench, lambda turn: samples.behind(bench, queue))


def timed_us(bench: Bench, body: Callable[[], None]) -> float:
    """Between events around a call. Collective."""
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
    """The mean of the middle half, which a coarse clock does not round; the largest over ranks."""
    half = sorted(times)[len(times) // 4 : -(len(times) // 4)]
    slowest = torch.tensor(sum(half) / len(half), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _spins(count: int, cycles: int) -> None:
    for _ in range(count):
        sleep(cycles)


class Raw(NamedTuple):
    """What is measured, in microseconds."""

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
    """Bytes and GB/s of copies to the peer: a copy and its flag behind a kernel, less the same without the copy."""
    times = {size: behind_us(bench, queue) - raw.write for size, queue in queues.copies.items()}
    return tuple((size, round(size / max(us, 0.1) / 1e3, 1)) for size, us in times.items())


def measure(bench: Bench, queues: Queues) -> Raw:
    """All of it. Collective."""
    exchanged = stamped_us(bench, lambda turn: samples.exchange(bench)) if bench.world_size % 2 == 0 else 0.0
    return Raw(
        one_spin=timed_us(bench, lambda: _spins(1, SPIN)),
        two_spins=timed_us(bench, lambda: _spins(2, SPIN)),
        short_spins=timed_us(bench, lambda: _spins(LAUNCHES, SPIN // LAUNCHES)),
        pair=stamped_us(bench, lambda turn: samples.pair(bench)),
        begin=stamped_us(bench, lambda turn: samples.begin(bench, turn)),
        write=behind_us(bench, queues.write),
        writes=behind_us(bench, queues.writes),
        signalled=stamped_us(bench, lambda turn: samples.signalled(bench, queues.wait)),
        launched=stamped_us(bench, lambda turn: samples.launched(bench, bench.wait_by_stream)),
        launched_by_kernel=stamped_us(bench, lambda turn: samples.launched(bench, bench.wait_by_kernel)),
        passed=stamped_us(bench, lambda turn: samples.passed(bench, bench.wait_by_stream)),
        passed_by_kernel=stamped_us(bench, lambda turn: samples.passed(bench, bench.wait_by_kernel)),
        join=stamped_us(bench, lambda turn: samples.join(bench)),
        look=stamped_us(bench, lambda turn: samples.looks(bench)) / LOOKS,
        passing=exchanged / (2 * ROUNDS),
    )


def latencies(raw: Raw) -> dict[str, float]:
    """The machine file's numbers, as overweave/hardware/machine.py says what each of them is.

    A pair of stamps is the tail of the first kernel and `kernel`. A pass of an exchange is `signal` and `observe`.
    """
    kernel = (raw.short_spins - raw.one_spin) / (LAUNCHES - 1)
    tail = raw.pair - kernel
    flag = (raw.writes - raw.write) / WRITES
    signal = max(0.0, raw.passing - raw.look)
    found = {
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
    return found if raw.passing else {name: us for name, us in found.items() if name != "signal"}


def element_wise(call_us: float) -> dict[str, float]:
    """GB/s that the passes of a library sum read and write. call_us: of a call and its kernel, which they take too."""
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

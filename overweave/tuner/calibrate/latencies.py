"""Latencies of a call's small steps on GPUs, and bandwidths of element-wise passes, by their names in the machine file.

Times between kernels are differences of the device's own clock, read by one-block kernels; `call` and `kernel` are
differences of whole calls between events. Every number is the mean of the middle half of its samples, on the slowest
rank. Pairs of ranks exchange signals; one rank alone does not. Every wait has a deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from overweave.compat.torch_names import sleep
from overweave.errors import MachineError
from overweave.ir.plan import SIGNAL_CAPACITY
from overweave.ir.tile_order import NO_SIGNAL
from overweave.kernels import latency as kernels
from overweave.kernels.arguments import SignalWords
from overweave.memory.cuda import driver
from overweave.memory.cuda.copy_engine import CopyQueue
from overweave.memory.cuda.heap import CudaHeap, group_has_peer_access
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.group import resolve
from overweave.memory.layout import SIGNAL_STRIDE_BYTES, SlotLayout
from overweave.memory.lower import CopyStep, MemoryRef, StreamStep, WaitStep, WriteStep
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import addresses_tensor, control_words, prologue_call, signal_words, wait_call
from overweave.tuner.calibrate.rates import medians_us

ALIGNED, HEAD_START = 500_000, 100_000  # cycles to hide the host, and for a side stream to begin to wait
POLLS = ROUNDS = 64
WRITES = 8
FLAG, GO, OWN, OTHERS = range(4)  # signal words, a cache line each; further writes go to OTHERS and up
OnStream = Callable[[int], None]
COPY_BYTES = tuple(1 << power for power in (16, 18, 20, 22, 24, 25))


class Bench:
    """This rank's signal words, streams and time stamps. peer: the rank it exchanges signals with."""

    def __init__(self, device: torch.device) -> None:
        group = resolve(None)
        if not group_has_peer_access(group, device):
            found, cure = "their GPUs do not reach each other's memory", "Calibrate on one rank: it measures no link"
            raise MachineError(f"calibrate on {group.world_size} ranks", found, cure)
        self.rank, self.world_size, self.peer = group.rank, group.world_size, group.rank ^ 1
        self.workspace = Workspace.of(group, device)
        self.heap = CudaHeap(group, device, (OTHERS + WRITES) * SIGNAL_STRIDE_BYTES)
        self.landing = CudaHeap(group, device, COPY_BYTES[-1])
        self.sent = torch.zeros(COPY_BYTES[-1], dtype=torch.uint8, device=device)
        self.stamps = torch.zeros(4, dtype=torch.int64, device=device)
        self.turns = torch.zeros(1, dtype=torch.int32, device=device)
        self.peer_word = addresses_tensor([self.word(OWN, self.peer % group.world_size)], device)
        self.main, self.side = torch.cuda.current_stream(), torch.cuda.Stream(device, priority=-1)
        self._one, self._forked, self._joined = (
            torch.ones(1, dtype=torch.float32, device=device),
            torch.cuda.Event(),
            torch.cuda.Event(),
        )
        self.begin = self._begin()
        self.limits = control_words(self.workspace), self.workspace.limits
        protocol = SignalWords(self.own(GO), *self.limits, group.world_size)
        self.wait_by_kernel: OnStream = Launch(wait_call(protocol, (0, 1, 1, NO_SIGNAL, 0), 0, 1)).start

    def wait_by_stream(self, stream: int) -> None:
        driver.wait_value(stream, self.word(GO), 1)

    def word(self, place: int, rank: int | None = None) -> int:
        """Return the address of a word on a rank; None: this rank."""
        return self.heap.addresses[self.rank if rank is None else rank] + place * SIGNAL_STRIDE_BYTES

    def own(self, place: int) -> torch.Tensor:
        return self.heap.view(place * SIGNAL_STRIDE_BYTES, (1,), torch.int32)

    def align(self) -> None:
        """Hide the host behind a sleep, then let all ranks start together."""
        torch.cuda.synchronize()
        sleep(ALIGNED)
        dist.all_reduce(self._one, dist.ReduceOp.MAX)

    def fork(self) -> None:
        self._forked.record(self.main)
        self.side.wait_event(self._forked)

    def rejoin(self) -> None:
        self._joined.record(self.side)
        self.main.wait_event(self._joined)

    def stamp(self, place: int, stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream or self.main):
            kernels.stamp_kernel[(1,)](self.stamps, place, num_warps=1)

    def watch(self, place: int, word: int) -> None:
        kernels.watch_kernel[(1,)](self.stamps, place, self.own(word), *self.limits, num_warps=1)

    def reset(self) -> None:
        for place in (FLAG, GO):
            driver.write_value(self.main.cuda_stream, self.word(place), 0)

    def _begin(self) -> OnStream:
        layout = SlotLayout(signals=16, pads={}, buffers={}, size_bytes=SIGNAL_CAPACITY * SIGNAL_STRIDE_BYTES)
        workspace = self.workspace
        heap = workspace.lease(layout)
        return Launch(prologue_call(workspace, signal_words(workspace, heap, 16), 16)).start


class Queues:
    """The copy queues that are timed."""

    def __init__(self, bench: Bench) -> None:
        flag = WriteStep(bench.word(FLAG), 1)
        more = tuple(WriteStep(bench.word(OTHERS + place), 1) for place in range(WRITES))
        self.write = CopyQueue((flag,))
        self.writes = CopyQueue((*more, flag))
        self.wait = CopyQueue((WaitStep(bench.word(GO), 1), flag))
        self.copies = {size: CopyQueue((_push(bench, size), flag)) for size in COPY_BYTES}  # bytes -> queue


def _push(bench: Bench, size: int) -> StreamStep:
    target = bench.landing.addresses[bench.peer % bench.world_size]
    return CopyStep(MemoryRef(None, bench.sent.data_ptr(), size), MemoryRef(None, target, size), size, 1)


# Each of the following functions enqueues one sample, which writes its begin and end to stamps 0 and 1.


def pair(bench: Bench) -> None:
    bench.stamp(0)
    bench.stamp(1)


def begin(bench: Bench, sample: int) -> None:
    bench.stamp(0)
    bench.begin(bench.main.cuda_stream)
    bench.stamp(1)


def flag_behind_kernel(bench: Bench, queue: CopyQueue) -> None:
    """Time from a kernel to the flag that a queue on the side stream writes behind it."""
    bench.reset()
    queue.prepare(bench.side.cuda_stream, {})
    bench.stamp(0)
    bench.fork()
    queue.launch(bench.side.cuda_stream, {})
    bench.watch(1, FLAG)
    bench.rejoin()


def signal_to_flag(bench: Bench, queue: CopyQueue) -> None:
    """Time from a kernel's signal to the flag of a queue that has waited for it."""
    bench.reset()
    queue.prepare(bench.side.cuda_stream, {})
    bench.fork()
    sleep(HEAD_START)
    kernels.release_kernel[(1,)](bench.stamps, 0, bench.own(GO), num_warps=1)
    queue.launch(bench.side.cuda_stream, {})
    bench.watch(1, FLAG)
    bench.rejoin()


def signal_to_kernel(bench: Bench, wait: OnStream) -> None:
    """Time from a kernel's signal to the start of a kernel behind a wait for it, of the stream or of a kernel."""
    bench.reset()
    bench.fork()
    sleep(HEAD_START)
    kernels.release_kernel[(1,)](bench.stamps, 0, bench.own(GO), num_warps=1)
    wait(bench.side.cuda_stream)
    bench.stamp(1, bench.side)
    bench.rejoin()


def satisfied_wait(bench: Bench, wait: OnStream) -> None:
    """Time between two kernels of one stream with a wait between them whose signal is there already."""
    driver.write_value(bench.main.cuda_stream, bench.word(GO), 1)
    bench.stamp(0)
    wait(bench.main.cuda_stream)
    bench.stamp(1)


def join(bench: Bench) -> None:
    """Time from a kernel on the side stream to one on the caller's stream that follows it."""
    bench.fork()
    bench.stamp(0, bench.side)
    bench.rejoin()
    bench.stamp(1)


def polls(bench: Bench) -> None:
    driver.write_value(bench.main.cuda_stream, bench.word(GO), 1)
    kernels.look_kernel[(1,)](bench.stamps, 0, bench.own(GO), *bench.limits, LOOKS=POLLS, num_warps=1)


def ping_pong(bench: Bench) -> None:
    words = (bench.own(OWN), bench.peer_word, bench.turns, *bench.limits)
    leads = 1 - bench.rank % 2
    kernels.exchange_kernel[(1,)](bench.stamps, 0, *words, leads, ROUNDS=ROUNDS, num_warps=1)


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
    return between_stamps_us(bench, lambda turn: flag_behind_kernel(bench, queue))


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


Raw = dict[str, float]  # name of a sample -> microseconds


def push_points(bench: Bench, queues: Queues, raw: Raw) -> tuple[tuple[int, float], ...]:
    """Return bytes and GB/s of copies to the peer: a copy and its flag behind a kernel, less the same without the
    copy."""
    times = {size: flag_us(bench, queue) - raw["write"] for size, queue in queues.copies.items()}
    return tuple((size, round(size / max(us, 0.1) / 1e3, 1)) for size, us in times.items())


def measure(bench: Bench, queues: Queues) -> Raw:
    """Return all times. Collective."""
    between: dict[str, Callable[[int], None]] = {
        "pair": lambda turn: pair(bench),
        "begin": lambda turn: begin(bench, turn),
        "write": lambda turn: flag_behind_kernel(bench, queues.write),
        "writes": lambda turn: flag_behind_kernel(bench, queues.writes),
        "signalled": lambda turn: signal_to_flag(bench, queues.wait),
        "launched": lambda turn: signal_to_kernel(bench, bench.wait_by_stream),
        "launched_by_kernel": lambda turn: signal_to_kernel(bench, bench.wait_by_kernel),
        "passed": lambda turn: satisfied_wait(bench, bench.wait_by_stream),
        "passed_by_kernel": lambda turn: satisfied_wait(bench, bench.wait_by_kernel),
        "join": lambda turn: join(bench),
        "look": lambda turn: polls(bench),
    }
    if bench.world_size % 2 == 0:
        between["passing"] = lambda turn: ping_pong(bench)
    spins = {"one_spin": (1, SPIN), "two_spins": (2, SPIN), "short_spins": (LAUNCHES, SPIN // LAUNCHES)}
    raw = {name: timed_us(bench, partial(_spins, *each)) for name, each in spins.items()}
    raw |= {name: between_stamps_us(bench, body) for name, body in between.items()}
    return raw | {"look": raw["look"] / POLLS, "passing": raw.get("passing", 0.0) / (2 * ROUNDS)}


def latencies(raw: Raw) -> dict[str, float]:
    """Return the machine file's latencies (overweave/hardware/machine.py describes them). A pair of stamps measures the
    tail of the first kernel and `kernel`. A pass of a ping-pong is `signal` and `observe`."""
    kernel = (raw["short_spins"] - raw["one_spin"]) / (LAUNCHES - 1)
    tail = raw["pair"] - kernel
    flag = (raw["writes"] - raw["write"]) / WRITES
    signal = max(0.0, raw["passing"] - raw["look"])
    numbers = {
        "call": 2 * raw["one_spin"] - raw["two_spins"],
        "begin": raw["begin"] - raw["pair"],
        "kernel": kernel,
        "graph": raw["write"] - tail - flag - raw["look"],
        "signal": signal,
        "flag": flag,
        "observe": raw["look"],
        "stream_wait": raw["signalled"] - signal - flag - raw["look"],
        "stream_wait, a launch behind it": raw["launched"] - signal - kernel,
        "stream_wait, a launch behind it, by a kernel": raw["launched_by_kernel"] - signal - kernel,
        "stream_wait, satisfied": raw["passed"] - raw["pair"],
        "stream_wait, satisfied, by a kernel": raw["passed_by_kernel"] - raw["pair"],
        "join": raw["join"] - raw["pair"],
    }
    return numbers if raw["passing"] else {name: us for name, us in numbers.items() if name != "signal"}


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

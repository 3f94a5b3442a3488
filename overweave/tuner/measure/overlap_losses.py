"""Measured overlap losses on one GPU: of cutting a matmul (decomposition), and of copies beside it (contention).

A matmul and its cuts alternate on random data, as cuBLAS matmuls in one stream. Contention: W matmuls of a W-th of the
rows, while a side stream copies without a pause, from pinned host memory by a copy engine, or within the GPU by a
kernel on some SMs; and the other way round. Links between GPUs are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil

import torch
from msgspec.structs import replace

from overweave.errors import MachineError
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import CopyConfig
from overweave.ir.problem import Problem
from overweave.ir.shards import piece_rows, tile_parts
from overweave.ir.tile_order import COPY, NO_SIGNAL, WORKSPACE, TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import Moving, TileKernelArgs, table_tensor
from overweave.runtime.kernel_calls.sums_and_copies import Pushes, copy_call
from overweave.runtime.library.library import multiply_into
from overweave.schedules.catalog.catalog import LIBRARY_ALIGNMENT
from overweave.tuner.measure.timer import Effort, compare, median
from overweave.tuner.model.overlap_losses import MATMULS

WORD_BYTES = 16


class SmCopies:
    """Copies rows of `source`, int32, as the table says. zones: the address of each target, and of its signals."""

    def __init__(
        self,
        config: CopyConfig,
        source: torch.Tensor,
        row_bytes: int,
        table: tuple[TileRow, ...],
        zones: Sequence[tuple[int, int]],
        calls: int,
    ) -> None:
        """calls: how many counters there are; a call's number says which is its own."""
        device = source.device
        self._counters = torch.zeros(calls * WORD_BYTES, dtype=torch.uint8, device=device)
        words = torch.zeros(64, dtype=torch.int32, device=device)
        limits = torch.zeros(3 + len(zones), dtype=torch.int64, device=device)
        targets = torch.tensor([list(zone) for zone in zones], dtype=torch.int64, device=device)
        self._claims = Moving(self._counters.data_ptr(), torch.int32)
        queue = LaunchTiles(table_tensor(table, device), self._claims, limits, len(table))
        tiles = TileKernelArgs(queue, SignalWords(words, words, limits, len(zones) + 1))
        self._launch = Launch(copy_call(config, tiles, Pushes(targets, source, row_bytes // WORD_BYTES)))
        self._alive = words, limits, targets  # the launch holds their addresses

    def __call__(self, call: int) -> torch.Tensor:
        self._claims.address = self._counters.data_ptr() + call * WORD_BYTES
        self._launch.start(torch.cuda.current_stream().cuda_stream)
        return self._counters


EFFORT = Effort(rounds=7, warmup=2, host_calls=0)
USABLE_SHARE = 0.6  # of the free memory
COPIED_BYTES, ROW_BYTES, TILE_KIB = 1 << 27, 8192, 128
SMS = (8, 16, 32)
MOST_CALLS = 1 << 16  # of one kind of copy
HOST_COPIES = "host copies"
LONGER = 1.3  # the concurrent work lasts this factor longer than the timed work
SampleCall = Callable[[int], object]


def loss_names(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the measured losses of each kind."""
    names_beside = tuple(name for mover in _movers() for name in (f"matmul beside {mover}", f"{mover} beside matmul"))
    return (MATMULS if "dil" in kinds else ()) + (names_beside if "cil" in kinds else ())


def gpu_here() -> str:
    """Return the name of the GPU. Raises MachineError if there is none."""
    if not torch.cuda.is_available():
        raise MachineError("characterize", "torch sees no GPU here", "Give --simulate MACHINE, such as h200x8")
    return torch.cuda.get_device_name()


def free_bytes() -> int:
    """Return the free bytes of the GPU's memory, those of torch's cache included."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def shrink_to_memory(problem: Problem, free_bytes: int) -> tuple[Problem, int]:
    """Return the problem with the larger of m and k halved until it fits into memory, and the divisor."""
    scaled = 1
    while _needed_bytes(problem) > USABLE_SHARE * free_bytes and max(problem.m, problem.k) > problem.world_size**2:
        halved = {"m": problem.m // 2} if problem.m >= problem.k else {"k": problem.k // 2}
        problem, scaled = replace(problem, **halved), scaled * 2
    return problem, scaled


def measured_losses(problem: Problem, names: tuple[str, ...], effort: Effort = EFFORT) -> dict[str, float]:
    """Return the factors of those names on the current GPU, or, of matmuls alone, on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operands = _Here(problem, device, effort)
    losses = operands.cuts() if set(MATMULS) & set(names) else {}
    for mover in _movers():
        if f"matmul beside {mover}" in names:
            losses |= operands.beside(mover)
    return {name: losses[name] for name in names}


def _movers() -> tuple[str, ...]:
    return (HOST_COPIES, *(f"copies on {sms} SMs" for sms in SMS))


def _needed_bytes(problem: Problem) -> int:
    item, m, n, k = ITEMSIZE_BYTES[problem.dtype], problem.m, problem.n, problem.k
    return item * (m * k + n * k + m * n) + ITEMSIZE_BYTES["float32"] * m * n + 2 * COPIED_BYTES


class _Here:
    """The operands of one problem on a device."""

    def __init__(self, problem: Problem, device: torch.device, effort: Effort) -> None:
        self.problem, self.device, self.effort = problem, device, effort
        dtype = getattr(torch, problem.dtype)
        self.a = torch.randn(problem.m, problem.k, device=device, dtype=dtype)
        self.b = torch.randn(problem.k, problem.n, device=device, dtype=dtype)
        self.out = torch.empty(problem.m, problem.n, device=device, dtype=dtype)
        self.sums = torch.empty(problem.m, problem.n, device=device, dtype=torch.float32)

    def cuts(self) -> dict[str, float]:
        """Return the factor of each cut over the whole matmul."""
        size, whole = self.problem.world_size, "whole"
        calls: dict[str, SampleCall] = {whole: lambda sample: self._whole()}
        for name, parts in zip(MATMULS[::2], (size, size**2), strict=True):
            calls[name] = partial(self._by_rows, parts)
        for name, parts in zip(MATMULS[1::2], (size, size**2), strict=True):
            calls[name] = partial(self._by_columns, parts)
        times = self._medians_us(calls)
        return {name: times[name] / times[whole] for name in MATMULS}

    def beside(self, mover: str) -> dict[str, float]:
        """Return the factors of matmuls beside copies and of copies beside matmuls, each over itself alone."""
        copies = _host_copy(self.device) if mover == HOST_COPIES else _sm_copy(mover, self.device)
        matmuls = partial(self._by_rows, self.problem.world_size)
        alone = self._medians_us({"matmuls": matmuls, "copies": copies})
        more_copies = ceil(LONGER * alone["matmuls"] / alone["copies"])
        more_matmuls = ceil(LONGER * alone["copies"] / alone["matmuls"])
        both = self._medians_us(
            {
                "matmuls": _call_beside(matmuls, copies, more_copies, self.device),
                "copies": _call_beside(copies, matmuls, more_matmuls, self.device),
            }
        )
        return {
            f"matmul beside {mover}": both["matmuls"] / alone["matmuls"],
            f"{mover} beside matmul": both["copies"] / alone["copies"],
        }

    def _whole(self) -> None:
        multiply_into(self.out, self.a, self.b, False)

    def _by_rows(self, parts: int, sample: int) -> None:
        for lo, hi in self._pieces(self.problem.m, parts):
            multiply_into(self.out[lo:hi], self.a[lo:hi], self.b, False)

    def _by_columns(self, parts: int, sample: int) -> None:
        for lo, hi in self._pieces(self.problem.k, parts):
            multiply_into(self.sums, self.a[:, lo:hi], self.b[lo:hi], lo > 0)

    def _pieces(self, extent: int, parts: int) -> Iterator[tuple[int, int]]:
        return (piece for piece in piece_rows((0, extent), parts, LIBRARY_ALIGNMENT) if piece[0] < piece[1])

    def _medians_us(self, calls: Mapping[str, SampleCall]) -> dict[str, float]:
        samples = compare(calls, self.device, None, self.effort)
        return {name: median(values) for name, values in samples.device_us.items()}


def _call_beside(timed: SampleCall, other: SampleCall, count: int, device: torch.device) -> SampleCall:
    """Return `timed` on the current stream, while `other` runs `count` times on a side stream, which starts first."""
    side, turns = torch.cuda.Stream(device, priority=-1), iter(range(1 << 62))

    def call(sample: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(count):
                other(next(turns))
        timed(sample)

    return call


def _host_copy(device: torch.device) -> SampleCall:
    """Return a copy from pinned host memory, by a copy engine."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    return lambda sample: target.copy_(source, non_blocking=True)


def _sm_copy(mover: str, device: torch.device) -> SampleCall:
    """Return a copy within the GPU by a kernel on some SMs, as the mover's name says."""
    programs = next(sms for sms in SMS if mover == f"copies on {sms} SMs")
    source = torch.zeros(COPIED_BYTES // 4, dtype=torch.int32, device=device)
    target, signals = torch.empty_like(source), torch.zeros(4096, dtype=torch.int32, device=device)
    rows = COPIED_BYTES // ROW_BYTES
    parts = tile_parts((0, rows), COPIED_BYTES // (TILE_KIB << 10))
    table = tuple(TileRow(COPY, lo, hi, 0, WORKSPACE, lo, 0, 0, 0, NO_SIGNAL, 0) for lo, hi in parts)
    zone = target.data_ptr(), signals.data_ptr()
    copies = SmCopies(CopyConfig(programs=programs), source, ROW_BYTES, table, [zone], MOST_CALLS)
    number = iter(range(1 << 62))

    def call(sample: int) -> tuple[object, torch.Tensor, torch.Tensor]:
        return copies(next(number)), target, signals

    return call

"""What cutting a matmul loses, and what copies beside it cost, measured on one GPU.

A matmul and its cuts run by turns on random data, as library matmuls in one stream. Beside copies: W matmuls of a W-th
of the rows, while a side stream copies without a pause, from pinned host memory by a copy engine, or within the GPU by
a kernel on some SMs; and the other way round. Links between GPUs are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from overweave.runtime.library.library import multiply_into
from overweave.schedules.catalog.catalog import LIBRARY_ALIGNMENT
from overweave.tuner.measure.sm_copies import SmCopies
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Effort, compare
from overweave.tuner.model.losses import MATMULS

EFFORT = Effort(rounds=7, warmup=2, host_calls=0)
ROOM = 0.6  # of the free memory
COPIED_BYTES, ROW_BYTES, TILE_KIB = 1 << 27, 8192, 128
SMS = (8, 16, 32)
MOST_CALLS = 1 << 16  # of one kind of copy
HOST_COPIES = "host copies"
LONGER = 1.3  # what runs beside lasts so much longer than what is timed
SampleCall = Callable[[int], object]


def measured_names(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """What is measured of each kind of loss."""
    beside = tuple(name for what in _movers() for name in (f"matmul beside {what}", f"{what} beside matmul"))
    return (MATMULS if "dil" in kinds else ()) + (beside if "cil" in kinds else ())


def gpu_here() -> str:
    """The name of the GPU that is measured. Raises MachineError where there is none."""
    if not torch.cuda.is_available():
        raise MachineError("characterize", "torch sees no GPU here", "Give --simulate MACHINE, such as h200x8")
    return torch.cuda.get_device_name()


def free_bytes() -> int:
    """Of the GPU's memory, with what torch had kept for later."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def fitted(problem: Problem, free_bytes: int) -> tuple[Problem, int]:
    """The problem with the larger of m and k halved until its operands, result and sums fit, and by what in all."""
    scaled = 1
    while _held_bytes(problem) > ROOM * free_bytes and max(problem.m, problem.k) > problem.world_size**2:
        halved = {"m": problem.m // 2} if problem.m >= problem.k else {"k": problem.k // 2}
        problem, scaled = replace(problem, **halved), scaled * 2
    return problem, scaled


def losses_here(problem: Problem, names: tuple[str, ...], effort: Effort = EFFORT) -> dict[str, float]:
    """The factors of those names on the current GPU, or, of matmuls alone, on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = _Here(problem, device, effort)
    found = here.cuts() if set(MATMULS) & set(names) else {}
    for what in _movers():
        if f"matmul beside {what}" in names:
            found |= here.beside(what)
    return {name: found[name] for name in names}


def _movers() -> tuple[str, ...]:
    return (HOST_COPIES, *(f"copies on {sms} SMs" for sms in SMS))


def _held_bytes(problem: Problem) -> int:
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
        """All cuts by turns with the whole."""
        size, whole = self.problem.world_size, "whole"
        calls: dict[str, SampleCall] = {whole: lambda turn: self._whole()}
        for name, parts in zip(MATMULS[::2], (size, size**2), strict=True):
            calls[name] = partial(self._by_rows, parts)
        for name, parts in zip(MATMULS[1::2], (size, size**2), strict=True):
            calls[name] = partial(self._by_columns, parts)
        times = self._medians_us(calls)
        return {name: times[name] / times[whole] for name in MATMULS}

    def beside(self, what: str) -> dict[str, float]:
        """Matmuls beside copies and copies beside matmuls, each over itself alone."""
        copies = _host_copy(self.device) if what == HOST_COPIES else _sm_copy(what, self.device)
        matmuls = partial(self._by_rows, self.problem.world_size)
        alone = self._medians_us({"matmuls": matmuls, "copies": copies})
        more_copies = ceil(LONGER * alone["matmuls"] / alone["copies"])
        more_matmuls = ceil(LONGER * alone["copies"] / alone["matmuls"])
        both = self._medians_us(
            {
                "matmuls": _beside(matmuls, copies, more_copies, self.device),
                "copies": _beside(copies, matmuls, more_matmuls, self.device),
            }
        )
        return {
            f"matmul beside {what}": both["matmuls"] / alone["matmuls"],
            f"{what} beside matmul": both["copies"] / alone["copies"],
        }

    def _whole(self) -> None:
        multiply_into(self.out, self.a, self.b, False)

    def _by_rows(self, parts: int, turn: int) -> None:
        for lo, hi in self._pieces(self.problem.m, parts):
            multiply_into(self.out[lo:hi], self.a[lo:hi], self.b, False)

    def _by_columns(self, parts: int, turn: int) -> None:
        for lo, hi in self._pieces(self.problem.k, parts):
            multiply_into(self.sums, self.a[:, lo:hi], self.b[lo:hi], lo > 0)

    def _pieces(self, extent: int, parts: int) -> Iterator[tuple[int, int]]:
        return (piece for piece in piece_rows((0, extent), parts, LIBRARY_ALIGNMENT) if piece[0] < piece[1])

    def _medians_us(self, calls: Mapping[str, SampleCall]) -> dict[str, float]:
        samples = compare(calls, self.device, None, self.effort)
        return {name: median(values) for name, values in samples.device_us.items()}


def _beside(timed: SampleCall, other: SampleCall, count: int, device: torch.device) -> SampleCall:
    """`timed` on the current stream while `other` runs so many times on a side stream, which began first."""
    side, turns = torch.cuda.Stream(device, priority=-1), iter(range(1 << 62))

    def call(turn: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(count):
                other(next(turns))
        timed(turn)

    return call


def _host_copy(device: torch.device) -> SampleCall:
    """By a copy engine, from pinned host memory."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    return lambda turn: target.copy_(source, non_blocking=True)


def _sm_copy(what: str, device: torch.device) -> SampleCall:
    """By a kernel on so many SMs, within the GPU."""
    programs = next(sms for sms in SMS if what == f"copies on {sms} SMs")
    source = torch.zeros(COPIED_BYTES // 4, dtype=torch.int32, device=device)
    target, signals = torch.empty_like(source), torch.zeros(4096, dtype=torch.int32, device=device)
    rows = COPIED_BYTES // ROW_BYTES
    parts = tile_parts((0, rows), COPIED_BYTES // (TILE_KIB << 10))
    table = tuple(TileRow(COPY, lo, hi, 0, WORKSPACE, lo, 0, 0, 0, NO_SIGNAL, 0) for lo, hi in parts)
    zone = target.data_ptr(), signals.data_ptr()
    copies = SmCopies(CopyConfig(programs=programs), source, ROW_BYTES, table, [zone], MOST_CALLS)
    number = iter(range(1 << 62))

    def call(turn: int) -> tuple[object, torch.Tensor, torch.Tensor]:
        return copies(next(number)), target, signals

    return call

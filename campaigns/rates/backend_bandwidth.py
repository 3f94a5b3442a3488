"""How fast each back end moves a transfer, by its size and by the SMs that it may use.

    torchrun --standalone --nproc-per-node 2 -m campaigns.backend_bandwidth [--csv FILE] [--quick]

Every rank sends as much to each peer, in ring order: by the copy engine; by loads and stores and by bulk copies, on SMs
of their own (kernels/copy.py) and by the programs of a kernel between its tiles, which here compute nothing (the slices
of lang/tile_table.py); by NCCL's all-gather. GB/s count what leaves a rank, on the slowest one, launch included. First
each is called once into cleared landing zones, which are compared byte for byte.
The machine file's `links.sm_push` is drawn from this. SOURCE: AutoOverlap, Figures 2c and 2d.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import join, report
from campaigns.rates.bandwidth_kernels import carry_kernel
from overweave.ir.plan import CopyConfig, DataPath
from overweave.ir.shards import tile_parts
from overweave.ir.tile_order import APPLY, COPY, WORKSPACE, TileRow
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group, resolve
from overweave.memory.layout import SIGNAL_STRIDE_BYTES
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import KernelCall, Moving, table_tensor
from overweave.tuner.measure.baselines import PeerCopies
from overweave.tuner.measure.overlap_losses import SmCopies
from overweave.tuner.measure.timer import Effort, compare, median

SIZES_KIB = (64, 256, 1024, 4096, 16384, 65536)  # to each peer
SMS = (4, 8, 16, 32, 64, 132)
PATHS: tuple[DataPath, ...] = ("load_store", "bulk")
ROW_BYTES = 8192
EFFORT = Effort(rounds=15, warmup=3, host_calls=0)
CALLS = EFFORT.warmup + EFFORT.rounds + 1
LARGEST_TILE_KIB, TILES_OF_A_PROGRAM, COUNTERS = 128, 2, 4
WARPS = 8  # of a program that also computes
Call = Callable[[int], object]


class Method(NamedTuple):
    """A back end with its SMs; 0: it has none of ours. call: by the number of the round."""

    back_end: str
    sms: int
    call: Call
    is_checked: bool


class Row(NamedTuple):
    """What was measured."""

    back_end: str
    sms: int
    bytes: int
    us: float
    gb_per_s: float


class Transfers:
    """What a rank sends, for one size, by every back end: `source` lands in the zone of this rank at every peer."""

    def __init__(self, group: Group, device: torch.device, size_bytes: int) -> None:
        self.group, self.device, self.size_bytes = group, device, size_bytes
        generator = torch.Generator(device=device).manual_seed(group.rank)
        self.source = torch.randint(-(2**31), 2**31 - 1, (size_bytes // 4,), device=device, generator=generator)
        self.source = self.source.to(torch.int32)
        self.head = group.world_size * SIGNAL_STRIDE_BYTES
        self.heap = CudaHeap(group, device, self.head + group.world_size * size_bytes)
        self.peers = [(group.rank - step) % group.world_size for step in range(1, group.world_size)]

    def piece(self, peer: int) -> tuple[int, int, int]:
        """What the copy engine pushes to a peer (tuner/measure/baselines.py)."""
        return 0, 0, self.size_bytes

    def call(self, config: CopyConfig, tile_kib: int) -> Call:
        """By the kernel of plans (kernels/copy.py), with a claim counter of its own that is zero."""
        zones = [(self.zone(peer), self.heap.addresses[peer]) for peer in self.peers]
        return SmCopies(config, self.source, ROW_BYTES, self.slices(tile_kib), zones, CALLS)

    def tile_kib(self, programs: int) -> int:
        """So that every program has a few tiles of a transfer, none longer than is good."""
        share = self.size_bytes * (self.group.world_size - 1) // (programs * TILES_OF_A_PROGRAM)
        return min(max(share, ROW_BYTES) >> 10, LARGEST_TILE_KIB)

    def carried(self, programs: int, path: DataPath) -> Call:
        """By the programs of a kernel, between their tiles: as many tiles as slices."""
        slices = self.slices(self.tile_kib(programs))
        tiles = [TileRow(APPLY, at, at + 1, 0, WORKSPACE, 0, 0, 0, 0, -1, 0, width=1) for at in range(len(slices))]
        table = table_tensor((*tiles, *slices), self.device)
        zones = [
            [self.zone(peer), self.heap.addresses[peer], self.source.data_ptr(), ROW_BYTES // 4] for peer in self.peers
        ]
        targets = torch.tensor(zones, dtype=torch.int64, device=self.device)
        counters = torch.zeros(CALLS * COUNTERS, dtype=torch.int32, device=self.device)
        claims = Moving(counters.data_ptr(), torch.int32)
        arguments: list[Any] = [table, claims, targets, self.source, len(tiles), len(slices), path == "bulk"]
        launch = Launch(KernelCall(carry_kernel, arguments, {"num_warps": WARPS}, min(programs, len(tiles))))

        def call(turn: int) -> torch.Tensor:
            claims.address = counters.data_ptr() + turn * COUNTERS * 4
            launch.start(torch.cuda.current_stream().cuda_stream)
            return counters

        return call

    def slices(self, tile_kib: int) -> tuple[TileRow, ...]:
        """The tiles of all transfers, so large each."""
        rows = self.size_bytes // ROW_BYTES
        parts = tile_parts((0, rows), -(-rows * ROW_BYTES // (tile_kib << 10)))
        rank = self.group.rank
        return tuple(
            TileRow(COPY, lo, hi, 0, WORKSPACE, lo, 0, 0, 0, rank, place)
            for place in range(len(self.peers))
            for lo, hi in parts
        )

    def zone(self, peer: int) -> int:
        """Where this rank's data lands at a peer."""
        return self.heap.addresses[peer] + self.head + self.group.rank * self.size_bytes

    def clear(self) -> None:
        """Nothing has landed here yet."""
        whole = self.group.world_size * self.size_bytes
        self.heap.view(self.head, (whole // 4,), torch.int32).zero_()
        torch.cuda.synchronize()
        dist.barrier()

    def missing(self) -> Iterator[str]:
        """Peers whose data has not landed here."""
        torch.cuda.synchronize()
        dist.barrier()
        for peer in range(self.group.world_size):
            theirs = self.source.clone()
            dist.broadcast(theirs, peer)
            zone = self.heap.view(self.head + peer * self.size_bytes, (self.size_bytes // 4,), torch.int32)
            if peer != self.group.rank and not torch.equal(zone, theirs):
                yield f"{self.size_bytes} bytes from rank {peer} did not arrive"


def methods(transfers: Transfers, sms: tuple[int, ...]) -> Iterator[Method]:
    copies = PeerCopies(transfers.group, transfers.device, transfers.size_bytes, transfers.piece)

    def by_engine(turn: int) -> None:
        copies.start(transfers.source)
        copies.join()

    gathered = transfers.source.new_empty(transfers.group.world_size * transfers.source.numel())
    yield Method("copy_engine", 0, by_engine, False)
    yield Method("nccl", 0, lambda turn: dist.all_gather_into_tensor(gathered, transfers.source), False)
    for path in PATHS:
        for programs in sms:
            config = CopyConfig(programs=programs, path=path)
            name = f"{path}, own SMs"
            yield Method(name, programs, transfers.call(config, transfers.tile_kib(programs)), True)
        for programs in sms:
            yield Method(f"{path}, between tiles", programs, transfers.carried(programs, path), True)


def measure(transfers: Transfers, sms: tuple[int, ...]) -> Iterator[Row]:
    """Checks every back end, then measures all of them by turns. Collective."""
    listed, started, failures = list(methods(transfers, sms)), time.monotonic(), list[str]()
    for method in listed:
        if method.is_checked:
            transfers.clear()
            method.call(CALLS - 1)
            failures += [f"{method.back_end}, {method.sms} SMs: {said}" for said in transfers.missing()]
    report.line(f"{transfers.size_bytes >> 10} KiB to each peer", len(listed), failures, started)
    named = {f"{method.back_end} {method.sms}": method for method in listed}
    samples = compare(
        {name: one.call for name, one in named.items()}, transfers.device, transfers.group.process_group, EFFORT
    )
    sent = transfers.size_bytes * (transfers.group.world_size - 1)
    for name, values in samples.device_us.items():
        took_us = median(values)
        yield Row(named[name].back_end, named[name].sms, transfers.size_bytes, took_us, sent / took_us / 1e3)


def show(rows: list[Row]) -> None:
    """GB/s: a line for each back end and number of SMs, a column for each size."""
    sizes = sorted({row.bytes for row in rows})
    print(f"{'GB/s':<26} {'SMs':>4} " + " ".join(f"{size >> 10:>8} KiB" for size in sizes))
    rates = {(row.back_end, row.sms, row.bytes): row.gb_per_s for row in rows}
    for back_end, sms in dict.fromkeys((row.back_end, row.sms) for row in rows):
        cells = " ".join(f"{rates[back_end, sms, size]:>12.1f}" for size in sizes)
        print(f"{back_end:<26} {sms or '-':>4} {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.rates.backend_bandwidth", description=__doc__)
    parser.add_argument("--csv", type=Path, help="write the rows there, too")
    parser.add_argument("--quick", action="store_true", help="two sizes, two numbers of SMs")
    arguments = parser.parse_args()
    device = join(timedelta(seconds=60))
    group, rows = resolve(None), list[Row]()
    for size_kib in SIZES_KIB[2:5:2] if arguments.quick else SIZES_KIB:
        rows += measure(Transfers(group, device, size_kib << 10), SMS[2:4] if arguments.quick else SMS)
    if group.rank == 0:
        show(rows)
        if arguments.csv:
            with arguments.csv.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(Row._fields)
                writer.writerows((*row[:3], f"{row.us:.2f}", f"{row.gb_per_s:.2f}") for row in rows)
    report.finish()


if __name__ == "__main__":
    main()

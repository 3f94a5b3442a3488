"""How fast do SMs push alone? By their number, by size, by what a program has under way; beside the copy engine.

    torchrun --standalone --nproc-per-node 4 -m campaigns.gpu_pushes

Every rank pushes as much to each peer, in ring order, with the kernel that plans name (kernels/copy.py). GB/s count
what leaves a rank, on the slowest one, launch included. Then every landing zone is compared and every signal counted.
The machine file's `links.sm_push` and `latency.copy_tile` are drawn from this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import join, report
from overweave.ir.plan import CopyConfig
from overweave.ir.shards import tile_parts
from overweave.ir.tile_order import COPY, WORKSPACE, TileRow
from overweave.kernels.arguments import SignalWords, TileQueue
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group, resolve
from overweave.memory.layout import SIGNAL_STRIDE_BYTES
from overweave.runtime.gpu.kernels.arguments import Moving, table_tensor
from overweave.runtime.gpu.kernels.kernels import copy_launch
from overweave.tuner.measure.peer_copies import PeerCopies
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Effort, compare

ROW_BYTES, WORD_BYTES = 8192, 16
SIZES_KIB = (64, 256, 1024, 4096, 16384)  # to each peer
TILES_KIB = (32, 128)
EFFORT = Effort(rounds=15, warmup=3, host_calls=0)
CONFIGS = (
    *(CopyConfig(programs=programs) for programs in (4, 8, 16, 24, 32, 64)),
    *(CopyConfig(programs=programs, path="bulk") for programs in (4, 8, 16, 32, 64)),
    CopyConfig(block_kib=16),
    CopyConfig(block_kib=64),
    CopyConfig(block_kib=64, warps=32),
    CopyConfig(block_kib=16, warps=8),
)


class Pushes:
    """All pushes of this rank, for one size: `source` lands in the zone of this rank at every peer."""

    def __init__(self, group: Group, device: torch.device, size_bytes: int) -> None:
        self.group, self.device, self.size_bytes = group, device, size_bytes
        generator = torch.Generator(device=device).manual_seed(group.rank)
        self.source = torch.randint(-(2**31), 2**31 - 1, (size_bytes // 4,), device=device, generator=generator)
        self.source = self.source.to(torch.int32)
        self.head = group.world_size * SIGNAL_STRIDE_BYTES
        self.heap = CudaHeap(group, device, self.head + group.world_size * size_bytes)
        self.expected = 0  # of each peer's signal

    def call(self, config: CopyConfig, tile_kib: int) -> Callable[[int], object]:
        """Launches the kernel, with a claim counter of its own that is zero."""
        rank, world_size = self.group.rank, self.group.world_size
        peers = [(rank - step) % world_size for step in range(1, world_size)]
        rows = self.size_bytes // ROW_BYTES
        tiles = -(-rows * ROW_BYTES // (tile_kib << 10))
        table = [
            TileRow(COPY, lo, hi, 0, WORKSPACE, lo, 0, 0, 0, rank, place)
            for place in range(len(peers))
            for lo, hi in tile_parts((0, rows), tiles)
        ]
        zones = [[self.heap.addresses[peer] + self.head + rank * self.size_bytes, self.heap.addresses[peer]]
                 for peer in peers]  # fmt: skip
        calls = EFFORT.warmup + EFFORT.rounds + 1
        counters = torch.zeros(calls * WORD_BYTES, dtype=torch.uint8, device=self.device)
        words = torch.zeros(64, dtype=torch.int32, device=self.device)
        limits = torch.zeros(2 + world_size, dtype=torch.int64, device=self.device)
        targets = torch.tensor(zones, dtype=torch.int64, device=self.device)
        claims = Moving(counters.data_ptr(), torch.int32)
        queue = TileQueue(table_tensor(tuple(table), self.device), claims, limits, len(table))
        arguments = [
            targets,
            self.source,
            queue,
            SignalWords(words, words, limits, world_size),
            ROW_BYTES // WORD_BYTES,
        ]
        launch = copy_launch(config, arguments, len(table), traced=False)

        def call(turn: int) -> torch.Tensor:
            claims.address = counters.data_ptr() + turn * WORD_BYTES
            launch(torch.cuda.current_stream().cuda_stream)
            self.expected += tiles
            return counters

        return call

    def piece(self, peer: int) -> tuple[int, int, int]:
        """What the copy engine pushes to a peer (tuner/measure/peer_copies.py)."""
        return 0, 0, self.size_bytes

    def failures(self) -> Iterator[str]:
        """Zones that do not hold their peer's source, and signals that were not raised once per tile."""
        torch.cuda.synchronize()
        dist.barrier()
        for peer in range(self.group.world_size):
            theirs = self.source.clone()
            dist.broadcast(theirs, peer)
            zone = self.heap.view(self.head + peer * self.size_bytes, (self.size_bytes // 4,), torch.int32)
            count = int(self.heap.view(peer * SIGNAL_STRIDE_BYTES, (1,), torch.int32))
            if peer != self.group.rank and not torch.equal(zone, theirs):
                yield f"{self.size_bytes} bytes from rank {peer} did not arrive"
            if peer != self.group.rank and count != self.expected:
                yield f"rank {peer} signalled {count} times, not {self.expected}"
        dist.barrier()


def measure(pushes: Pushes, copies: PeerCopies) -> Iterator[tuple[str, float]]:
    """(what, us) of every configuration and of the copy engine."""

    def by_engine(turn: int) -> None:
        copies.start(pushes.source)
        copies.join()

    calls: dict[str, Callable[[int], object]] = {"copy engine": by_engine}
    for config in CONFIGS:
        for tile_kib in TILES_KIB if config == CopyConfig() else TILES_KIB[-1:]:
            label = f"{config.path}, {config.programs} SMs, {config.warps} warps, {config.block_kib} KiB"
            label += f", tiles of {tile_kib} KiB"
            calls[label] = pushes.call(config, tile_kib)
    samples = compare(calls, pushes.device, pushes.group.process_group, EFFORT)
    for label, values in samples.device_us.items():
        yield label, median(values)


def main() -> None:
    device = join(timedelta(seconds=120))
    group = resolve(None)
    for size_kib in SIZES_KIB:
        started = time.monotonic()
        pushes = Pushes(group, device, size_kib << 10)
        copies = PeerCopies(group, device, pushes.size_bytes, pushes.piece)
        sent = (group.world_size - 1) * pushes.size_bytes
        for label, took_us in measure(pushes, copies):
            if group.rank == 0:
                print(f"{size_kib:>6} KiB a peer  {label:<62} {took_us:8.1f} us {sent / took_us / 1e3:7.1f} GB/s")
        report.line(f"{size_kib} KiB to each peer", len(CONFIGS), list(pushes.failures()), started)
    report.finish()


if __name__ == "__main__":
    main()

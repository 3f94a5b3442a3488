"""How fast is the reduction kernel alone, by the shape of its tiles and by how many programs it has?

    torchrun --standalone --nproc-per-node 4 -m campaigns.gpu_reduction [--only TEXT] [--best N]

Sums as plans make them (campaigns/sum_shapes.py): of operands at peers, in two shots that tell each other, and of
operands that are all here; in every shape, all by turns, and beside torch's two-shot all-reduce of as much. us: of the
slowest rank, launch included. GB/s: what comes into a rank from its peers, or through its memory where nothing does.
Then each shape runs once more, and every bit of its result is compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import join, report
from campaigns.sum_shapes import CASES, REDUCE, Sums, shapes, with_sums
from overweave.ir.plan import Plan, ReduceConfig
from overweave.ir.schedule import OUTPUT, Reduce, Region
from overweave.memory.cuda_heap import CudaHeap
from overweave.memory.group import Group, resolve
from overweave.memory.layout import SIGNAL_STRIDE_BYTES, SIGNAL_STRIDE_WORDS, aligned, lay_out
from overweave.memory.lower import SlotAddresses, reduction_operands, widths_of
from overweave.memory.workspace import Workspace
from overweave.runtime.head import words_of
from overweave.runtime.kernels import Moving, Summing, reduction_launch, table_tensor
from overweave.tuner.statistics import median
from overweave.tuner.timer import Effort, compare

EFFORT = Effort(rounds=15, warmup=3, host_calls=0)
TURNS = EFFORT.warmup + EFFORT.rounds + 1  # the last one is looked at
CLAIM_BYTES = 16
TORCH = "torch two-shot"
Call = Callable[[int], object]


class Reductions:
    """The sums of one case on this rank: random operands, and signals of its own for each shape and turn."""

    def __init__(self, group: Group, device: torch.device, case: Sums, count: int) -> None:
        self.group, self.device = group, device
        self.plan = case.build(group.world_size)
        self.layout = lay_out(self.plan.schedule, "bfloat16")
        self.pad_bytes = max(self.layout.signals, 1) * SIGNAL_STRIDE_BYTES
        self.head = aligned(count * TURNS * self.pad_bytes)
        self.heap = CudaHeap(group, device, self.head + self.layout.size_bytes)
        self.workspace = Workspace.of(group, device)
        generator = torch.Generator(device=device).manual_seed(group.rank)
        for name in self.layout.buffers:
            self._buffer(name).normal_(generator=generator)
        self._others_have_told(count * TURNS)
        y = self.plan.schedule.buffer("y")
        self.y = torch.zeros((y.rows, y.cols), dtype=torch.bfloat16, device=device)
        self.expected = self._summed()

    @property
    def reduces(self) -> list[Reduce]:
        """The own ones."""
        return [op for op in self.plan.schedule.of_rank(self.group.rank) if isinstance(op, Reduce)]

    @property
    def moved_bytes(self) -> int:
        """What comes from peers; through memory, if nothing does."""
        parts = [part for reduce in self.reduces for part in reduce.operands]
        far = [part for part in parts if part.rank != self.group.rank]
        counted = far or [*parts, *(reduce.out for reduce in self.reduces)]
        return sum(2 * part.shape[0] * part.shape[1] for part in counted)

    def call(self, config: ReduceConfig, number: int) -> Call:
        """Launches the kernel in a shape. number: of the shape."""
        plan, rank = with_sums(self.plan, config, self.group.rank), self.group.rank
        rows = plan.tile_order(rank, "sums").rows
        reduces = [op for op in plan.schedule.of_rank(rank) if isinstance(op, Reduce)]
        table, turns = table_tensor(rows, self.device), self._operands(plan, number)
        counters = torch.zeros(TURNS * CLAIM_BYTES, dtype=torch.uint8, device=self.device)
        trace = torch.zeros(1, dtype=torch.int64, device=self.device)
        operands, signals = Moving(turns.data_ptr(), torch.int64), Moving(self.heap.tensor.data_ptr(), torch.int32)
        claims = Moving(counters.data_ptr(), torch.int32)
        words = words_of(self.workspace)
        arguments: list[Any] = [operands, self.y, table, claims, signals, words, self.workspace.limits, trace]
        arguments += [len(rows), self.y.shape[1], self.group.world_size]
        launch = reduction_launch(config, arguments, len(rows), widths_of(reduces), Summing())
        kept_alive = table, turns, counters, trace, words

        def call(turn: int) -> object:
            operands.address = turns[turn].data_ptr()
            claims.address = counters.data_ptr() + turn * CLAIM_BYTES
            signals.address = self.heap.tensor.data_ptr() + (number * TURNS + turn) * self.pad_bytes
            launch(torch.cuda.current_stream().cuda_stream)
            return kept_alive

        return call

    def is_right(self, call: Call) -> bool:
        """Whether the last turn leaves every bit of the sums here. Collective."""
        self.y.fill_(torch.nan)
        torch.cuda.synchronize()
        dist.barrier()
        call(TURNS - 1)
        self.workspace.check()
        return torch.equal(self.y, self.expected)

    def _operands(self, plan: Plan, number: int) -> torch.Tensor:
        """The kernel's addresses, of each turn: they differ in the signals that its tiles tell."""
        bases = tuple(address + self.head for address in self.heap.addresses)
        addresses = SlotAddresses(plan.schedule, "bfloat16", self.layout, bases)
        rows = reduction_operands(addresses, self.group.rank, "sums")
        told = widths_of([op for op in plan.schedule.of_rank(self.group.rank) if isinstance(op, Reduce)])[-1]
        rows += rows[:1] * (len(rows) % 2)  # so that those of each turn begin at a multiple of 16 bytes
        of_turns = torch.tensor([rows] * TURNS, dtype=torch.int64)
        pads = torch.arange(TURNS)[:, None, None] * self.pad_bytes + number * TURNS * self.pad_bytes - self.head
        of_turns[:, :, -told:] += torch.where(of_turns[:, :, -told:] != 0, pads, 0)
        return of_turns.to(self.device)

    def _others_have_told(self, pads: int) -> None:
        """Every signal that the sums wait for and do not raise themselves is as high as it gets, in every pad."""
        lines = self.heap.view(0, (pads, self.pad_bytes // SIGNAL_STRIDE_BYTES, SIGNAL_STRIDE_WORDS), torch.int32)
        told = {notify.pad for op in self.plan.schedule.operations if isinstance(op, Reduce) for notify in op.notifies}
        for wait in (wait for reduce in self.reduces for wait in reduce.waits if wait.pad not in told):
            lo, hi = (self.layout.signal(wait.pad, signal) for signal in wait.signals)
            lines[:, lo:hi, 0] = wait.count
        torch.cuda.synchronize()
        dist.barrier()

    def _summed(self) -> torch.Tensor:
        """This rank's result by torch: in fp32, in the plan's order, rounded once."""
        own = self.heap.tensor[self.head :]
        everyones = own.new_empty((self.group.world_size, own.numel()))
        dist.all_gather_into_tensor(everyones, own)
        result = torch.zeros_like(self.y)

        def view(region: Region) -> torch.Tensor:
            buffer = self.plan.schedule.buffer(region.buffer)
            matrix = result
            if buffer.home != OUTPUT:
                offset, size = self.layout.buffers[buffer.name], 2 * buffer.rows * buffer.cols
                matrix = everyones[region.rank, offset : offset + size].view(torch.bfloat16).view(buffer.rows, -1)
            return matrix[slice(*region.rows), slice(*region.cols)]

        reduces = [op for op in self.plan.schedule.operations if isinstance(op, Reduce)]
        for reduce in sorted(reduces, key=lambda each: not each.notifies):  # what others wait for comes first
            if reduce.notifies or reduce.rank == self.group.rank:
                total = torch.zeros(reduce.out.shape, device=self.device)
                for operand in reduce.operands:
                    total += view(operand)
                view(reduce.out).copy_(total)
        return result

    def _buffer(self, name: str) -> torch.Tensor:
        buffer = self.plan.schedule.buffer(name)
        return self.heap.view(self.head + self.layout.buffers[name], (buffer.rows, buffer.cols), torch.bfloat16)


def label(config: ReduceConfig) -> str:
    """A shape, for a line of the table."""
    return f"{config.block_m}x{config.block_n} {config.warps} warps, {config.programs} programs"


def measure(sums: Reductions, configs: list[ReduceConfig], by_torch: bool) -> Iterator[tuple[str, float, bool]]:
    """Each method with its time in us, and whether its result is right."""
    calls: dict[str, Call] = {label(config): sums.call(config, number) for number, config in enumerate(configs)}
    if by_torch:
        size_bytes = sums.y.numel() * 2
        heap, out = CudaHeap(sums.group, sums.device, size_bytes), torch.empty_like(sums.y)
        partial, name = heap.view(0, tuple(out.shape), torch.bfloat16), sums.group.name
        calls[TORCH] = lambda turn: torch.ops.symm_mem.two_shot_all_reduce_out(partial, "sum", name, out)
    samples = compare(calls, sums.device, sums.group.process_group, EFFORT)
    for name, values in samples.device_us.items():
        yield name, median(values), name == TORCH or report.all_agree(sums.is_right(calls[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--best", type=int, default=6, help="how many shapes to print of each case, the quickest first")
    arguments = parser.parse_args()
    device = join(timedelta(seconds=20))
    group = resolve(None)
    for case in (case for case in CASES if arguments.only in str(case)):
        started = time.monotonic()
        configs = list(shapes())
        chosen = case.build(group.world_size).realization.reduction
        assert chosen is not None
        configs = configs if chosen in configs else [chosen, *configs]
        sums = Reductions(group, device, case, len(configs))
        rows = sorted(measure(sums, configs, case.plan.startswith(f"{REDUCE}.two_shot")), key=lambda row: row[1])
        shown = {name for name, *_ in rows[: arguments.best]} | {label(chosen), TORCH}
        for name, took_us, _ in rows if group.rank == 0 else ():
            if name in shown:
                rate = sums.moved_bytes / took_us / 1e3
                mark = "  (the catalog's)" if name == label(chosen) else ""
                print(f"{case!s:<60} {name:<34} {took_us:8.1f} us {rate:7.1f} GB/s{mark}", flush=True)
        report.line(str(case), len(rows), [name for name, _, is_right in rows if not is_right], started)
    report.finish()


if __name__ == "__main__":
    main()

"""Compiled kernels on GPUs: every annotated kernel of examples/kernels, every schedule, against torch.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_authored [--only TEXT] [--calls 20] [--trials 20]

Inputs are small whole numbers where a product is exact, and change at every call; outputs start as NaN. First what
no schedule of a name does, then every kernel with every schedule: `--trials` bounds these. How long compiled kernels
take beside the operators: `campaigns.compiled_tables --parts against`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from campaigns.exact import authored_runs as runs
from campaigns.exact.authored_runs import Run, matmul
from campaigns.gpu_ranks import Check, arguments, run_campaign, spread_over
from campaigns.lint.authored_cases import (
    AT_PEERS,
    AUTHORS,
    BY_KERNEL,
    BY_TILES,
    CHUNKED_SUMS,
    GATHERS,
    KERNELS,
    PUSHED_BEHIND,
    SCATTERS,
    SPREADS,
)
from overweave.ops.author.compile import FusedKernel, compile
from overweave.schedules.communication import COPYING_KERNELS
from overweave.schedules.weave.transports import ScheduleChoice

CHUNKED = (
    "all_gather.mesh pieces=1 col_pieces=2 lanes=2",
    "all_gather.ring",
    "all_gather.double_ring",
    "all_gather.islands",
    "all_gather.packed",
)
REDUCED = ("all_reduce.two_shot pieces=2", "all_reduce.one_shot", "all_reduce.collective", "all_reduce.waves")
PACKED = ("reduce_scatter.packed", "all_reduce.one_shot_packed", "all_reduce.two_shot_packed")
EVERY = (*GATHERS, *BY_KERNEL, *BY_TILES)


class Trial(NamedTuple):
    """A kernel with the schedules of its tensors, and what calls it. shows: what the schedules' words do not say."""

    name: str
    schedule: Mapping[str, ScheduleChoice]
    run: Run
    shows: str = ""

    @property
    def words(self) -> str:
        """Kernel and schedules, or what they show."""
        schedules = (f"{tensor}={how}" for tensor, how in self.schedule.items())
        return " ".join([self.name, *([f"{'+'.join(self.schedule)}: {self.shows}"] if self.shows else schedules)])


def particular(ranks: int) -> Iterator[Trial]:
    """One of each kind that no name stands for: lists by hand, and tiles, shards and back ends that meet otherwise."""
    yield from _by_hand(ranks)
    yield Trial("matmul", {"B": GATHERS[0]}, matmul(False, "B"), "weights gathered whole")
    yield Trial("matmul", {"B": BY_TILES[0]}, matmul(False, "B"), "weights gathered whole, carried by tiles")
    yield Trial("matmul", {"A": "all_gather.push", "B": "all_gather.pull"}, matmul(False, "AB"))
    lanes = {"A": "all_gather.double_ring", "B": "all_gather.islands"}
    yield Trial("matmul", lanes, matmul(False, "AB"), "two tensors share lanes")
    tile = runs.scale().tile
    few = matmul(False, "A", tile // 4 * ranks)
    yield Trial("matmul", {"A": "all_gather.push"}, few, "a tile waits for all peers")
    halved, shows = runs.sent(5 * tile // 2), "tiles over two blocks"
    yield Trial("matmul", {"C": "all_to_all.send_collective"}, halved, f"{shows}, by the library")
    yield Trial("matmul", {"C": "all_to_all.send pieces=1"}, halved, shows)
    for how in (
        "scatter",
        "scatter pieces=2 mover=copy_kernel",
        "ring",
        "islands",
    ):  # shards of two tiles, less six rows
        odd = matmul(False, "C", ranks * (2 * tile - 6))
        yield Trial("matmul", {"C": f"reduce_scatter.{how}"}, odd, f"tiles over two shards, {how}")
    yield Trial("layer_norm", {"Y": AT_PEERS[2]}, runs.layer_norm("Y"), "a store at peers in a loop")


def _by_hand(ranks: int) -> Iterator[Trial]:
    rows, depth = runs.scale().rows * ranks, runs.scale().k
    gathered, summed = matmul(False, "A"), matmul(False, "C")
    mixed = runs.carried_and_pulled(ranks, rows)
    yield Trial("matmul", {"A": mixed}, gathered, "tiles carry beside pulls")
    yield Trial("persistent", {"A": mixed}, matmul(True, "A"), "tiles carry beside pulls")
    yield Trial("matmul", {"A": runs.carried_and_collected(ranks, rows)}, gathered, "tiles carry beside the library")
    yield Trial("matmul", {"A": runs.each_its_own(ranks, rows)}, gathered, "each rank its own way")
    yield Trial("persistent", {"A": runs.round_trip(ranks, rows, depth)}, matmul(True, "A"), "chunks by columns")
    yield Trial("matmul", {"C": runs.chain_of_sums(ranks, rows)}, summed, "a chain of sums")
    yield Trial("matmul", {"C": runs.each_its_own_sums(ranks, rows)}, summed, "each rank its own way")
    for everywhere, run in ((False, summed), (True, runs.reduced)):
        partly = runs.partly_summed_by_the_library(ranks, rows, everywhere)
        yield Trial("matmul", {"C": partly}, run, f"a part is summed by the library, everywhere={everywhere}")
    for both, shows in ((runs.blocks, "blocks in lanes"), (runs.partly_the_librarys, "a part is the library's")):
        schedules = {"A": both(ranks, rows, False), "C": both(ranks, rows, True)}
        yield Trial("matmul", schedules, runs.exchanged, shows)


def ordinary() -> Iterator[Trial]:
    """Every kernel with every schedule, by every back end."""
    yield from _summed()
    yield from _exchanged()
    for name, is_persistent in (("matmul", False), ("persistent", True)):
        yield from (Trial(name, {"A": how}, matmul(is_persistent, "A")) for how in (*EVERY, *CHUNKED))
        yield from (Trial(name, {"C": how}, matmul(is_persistent, "C")) for how in SCATTERS)
        yield Trial(name, {"A": GATHERS[0], "C": SCATTERS[0]}, matmul(is_persistent, "AC"))
    yield from (Trial("gate_up", {"X": how}, runs.gate_up) for how in EVERY)
    yield from (Trial("batched", {"A": how}, runs.batched) for how in EVERY)
    yield from (Trial("norm", {"OUT": how}, runs.norm) for how in SPREADS)
    yield from (Trial("layer_norm", {"X": how}, runs.layer_norm("X")) for how in EVERY)
    yield from (Trial("layer_norm", {"Y": how}, runs.layer_norm("Y")) for how in SPREADS)
    for is_causal in (False, True):
        for how in EVERY:
            values = GATHERS[0] if how in BY_KERNEL else how  # one kernel pushes, and it has one source
            yield Trial("attention", {"K": how, "V": values}, runs.attention(is_causal))


def _summed() -> Iterator[Trial]:
    for how in (*CHUNKED_SUMS, *PUSHED_BEHIND, *PACKED):
        yield Trial("matmul", {"C": how}, runs.reduced if how.startswith("all_reduce") else matmul(False, "C"))
    yield Trial("matmul", {"A": "all_gather.collective", "C": "reduce_scatter.ring"}, matmul(False, "AC"))
    yield Trial("persistent", {"A": "all_gather.ring", "C": "reduce_scatter.mesh"}, matmul(True, "AC"))
    yield Trial("persistent", {"A": "all_gather.packed", "C": "reduce_scatter.scatter"}, matmul(True, "AC"))
    yield Trial("matmul", {"A": "all_gather.push", "C": "reduce_scatter.packed"}, matmul(False, "AC"))
    yield from (Trial("persistent", {"C": how}, matmul(True, "C")) for how in PUSHED_BEHIND if "_kernel" in how)
    yield Trial("matmul", {"C": AT_PEERS[0]}, matmul(False, "C"))
    yield Trial("matmul", {"A": BY_TILES[0], "C": AT_PEERS[0]}, matmul(False, "AC"))
    yield from (Trial("matmul", {"C": how}, runs.reduced) for how in (*REDUCED, "all_reduce.two_shot mover=tiles"))
    one_shot = (f"all_reduce.one_shot mover={mover}" for mover in ("copy_kernel", "bulk_kernel", "tiles"))
    yield from (Trial("matmul", {"C": how}, runs.reduced) for how in one_shot)


def _exchanged() -> Iterator[Trial]:
    for mover in COPYING_KERNELS:
        yield Trial("matmul", {"C": f"all_to_all.send mover={mover}"}, runs.sent(runs.scale().rows))
    yield Trial("matmul", {"A": "all_to_all.receive", "C": "all_to_all.send"}, runs.exchanged)
    library = {"A": "all_to_all.receive_collective", "C": "all_to_all.send_collective"}
    yield Trial("matmul", library, runs.exchanged)
    yield Trial("matmul", library | {"C": "all_to_all.send_waves"}, runs.exchanged)
    yield Trial("matmul", {"A": "all_to_all.receive mover=bulk_tiles", "C": AT_PEERS[1]}, runs.exchanged)


def outcomes(trial: Trial, calls: int, fused: FusedKernel | None = None) -> Iterator[str]:
    """What is wrong with each call; nothing of one that is right. fused: the kernel, if it was compiled before."""
    fused = fused or compile(f"{KERNELS / trial.name}.py:{AUTHORS[trial.name].name}", trial.schedule)
    for call in range(calls):
        found, exact, tolerance = trial.run(fused, 17 * call)
        error = float((found.float() - exact).abs().max()) if exact.numel() else 0.0
        is_right = error <= tolerance * max(1.0, float(exact.abs().max()) / 256) if exact.numel() else True
        if trial.run is runs.reduced and is_right:
            first = found.clone()
            dist.broadcast(first, 0)
            is_right = torch.equal(first, found)
        yield "" if is_right else f"call {call}: off by {error}, or other bits than on the first rank"


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    first, others = particular(dist.get_world_size()), [one for one in ordinary() if asked.only in one.words]
    for trial in (*first, *spread_over(others, asked.trials or len(others))):
        yield Check(trial.words, partial(outcomes, trial, asked.calls))


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=20)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--trials", type=int, default=0, help="of the ordinary, how many, spread; 0: all")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()

"""Do calls fail as they should on GPUs? A late rank raises no false alarm; an absent one is found and named.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_faults --deadline 4 [--rounds 6] [--absent 3]

late: one rank comes up to half the deadline late, `--rounds` times: every result is right.
absent: one rank leaves out calls that the others launch, several ahead: the heads of these raise PeerTimeout within the
deadline + 1.5 s, and after a collective reset the group computes again. A case takes longer than the deadline:
`--absent 3` leaves it at three of them, spread over all.
lost: one rank takes part, but its copies do not come, and the callers' next kernel has never run before: the driver
loads it, waits for an idle GPU and holds up whoever asks for more. PeerTimeout is raised within the deadline + 1.5 s;
where streams wait that only the watcher ends, a context of its own takes up to two seconds more for each rank on a GPU.
replayed: the same in a graph of the caller's, of whose calls no host knows. PeerTimeout within the deadline + 1.5 s.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from campaigns.cases import ALL_GATHER, BY_ENGINES
from campaigns.exact.calls import Case
from campaigns.exact.trials import LATE_S, Tensors, Trial, absent_rank, computes_again, is_at_fault, of_case, survive
from campaigns.gpu_ranks import Check, arguments, run_campaign, sharers, spread_over
from overweave.errors import PeerError
from overweave.memory.cuda.copy_engine import CopyQueue

Kernel = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (1000, 512, 512, torch.bfloat16, True)
CASES = tuple(Case(one.operator, *SHAPE, one.plan) for one in BY_ENGINES)
LOST = (  # plans, whether only the watcher ends their streams' waits, and a kernel that nothing else here launches
    (Case(ALL_GATHER, *SHAPE, "push"), False, torch.erfinv),
    (Case(ALL_GATHER, *SHAPE, "per_shard"), False, torch.atanh),
    (Case(ALL_GATHER, 200, *SHAPE[1:], "push pieces=2"), True, torch.sinh),
)
OFF_ALIGNMENT = 16  # elements, of what torch's allocator aligns to
CONTEXT_S = 2.0  # of each rank of a GPU but the one at fault: they make theirs at once


def late_rank(trial: Trial, rounds: int, deadline_s: float) -> Iterator[str]:
    """What is wrong with `rounds` calls in which a random rank is late by up to half the deadline."""
    chance, rank, given = random.Random(3), dist.get_rank(), trial.inputs(1)
    wanted = trial.exact(1, given)
    trial.run(given)  # compiles
    torch.cuda.synchronize()
    dist.barrier()
    for index in range(rounds):
        late, delay_s = chance.randrange(dist.get_world_size()), chance.uniform(0, deadline_s / 2)
        if index >= 2:
            delay_s /= 10  # two full delays, the rest short: the campaign has minutes, not hours
        if rank == late:
            time.sleep(delay_s)
        try:
            is_wrong = bool(trial.differs(trial.run(given), wanted))
            yield f"wrong result, rank {late} late by {delay_s:.2f} s" if is_wrong else ""
        except PeerError as error:
            yield f"false alarm: {error}"


def lost_copies(trial: Trial, ends_s: float, new_kernel: Kernel) -> list[str]:
    """What is wrong with a call in which what the last rank copies does not arrive, and with one behind the reset."""

    def calls(given: Tensors) -> list[str]:
        elsewhere = _elsewhere(given)
        if not is_at_fault():
            return survive(trial.name, lambda: new_kernel(trial.run(elsewhere)), ends_s + LATE_S)
        with patch.object(CopyQueue, "launch"):
            trial.run(elsewhere)
        time.sleep(ends_s)
        return []

    return computes_again(trial, calls)


def replayed_without_copies(trial: Trial, limit_s: float) -> list[str]:
    """What is wrong with the same call in a graph."""

    def calls(given: Tensors) -> list[str]:
        graph = torch.cuda.CUDAGraph()
        with patch.object(CopyQueue, "launch") if is_at_fault() else nullcontext(), torch.cuda.graph(graph):
            out = trial.run(given)
        dist.barrier()
        if not is_at_fault():
            return survive(trial.name, lambda: _replayed(graph, out), limit_s)
        graph.replay()
        time.sleep(limit_s)
        return []

    return computes_again(trial, calls)


def _replayed(graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> torch.Tensor:
    graph.replay()
    torch.cuda.synchronize()  # nobody else waits for what a graph holds
    return out


def _elsewhere(given: Tensors) -> Tensors:
    """The same with x at an address that no call has had, of which no graph is kept: its copies are launched alone."""
    x, *others = given
    room = x.new_empty(x.numel() + OFF_ALIGNMENT)
    return room[OFF_ALIGNMENT:].view_as(x).copy_(x), *others


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    deadline_s, limit_s = asked.deadline, asked.deadline + LATE_S
    for case in CASES:
        yield Check(f"late rank, {case.name}", partial(late_rank, of_case(case), asked.rounds, deadline_s))
    for case in spread_over(CASES, asked.absent):
        yield Check(f"absent rank, {case.name}", partial(absent_rank, of_case(case), limit_s), 1)
    for case, by_watcher, new_kernel in LOST:
        ends_s = deadline_s + by_watcher * CONTEXT_S * max(1, sharers() - 1)
        yield Check(f"lost copies, {case.name}", partial(lost_copies, of_case(case), ends_s, new_kernel), 1)
    for case, *_ in LOST:
        yield Check(f"lost copies, replayed, {case.name}", partial(replayed_without_copies, of_case(case), limit_s), 1)


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--absent", type=int, default=len(CASES), help="how many cases lose a rank")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()

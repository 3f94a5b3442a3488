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
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import ALL_GATHER, BY_ENGINES
from campaigns.exact.calls import Case, Inputs, expected, make_inputs, run
from campaigns.gpu_ranks import join, report, sharers, spread_over
from overweave.errors import PeerError
from overweave.memory.cuda.copy_engine import CopyQueue

SHAPE = (1000, 512, 512, torch.bfloat16, True)
CASES = tuple(Case(one.operator, *SHAPE, one.plan) for one in BY_ENGINES)
LOST = (  # plans, whether only the watcher ends their streams' waits, and a kernel that nothing else here launches
    (Case(ALL_GATHER, *SHAPE, "push"), False, torch.erfinv),
    (Case(ALL_GATHER, *SHAPE, "per_shard"), False, torch.atanh),
    (Case(ALL_GATHER, 200, *SHAPE[1:], "push pieces=2"), True, torch.sinh),
)

Kernel = Callable[[torch.Tensor], torch.Tensor]
OFF_ALIGNMENT = 16  # elements, of what torch's allocator aligns to
LATE_S = 1.5  # behind its deadline a wait has ended, and the host has heard of it
CONTEXT_S = 2.0  # of each rank of a GPU but the one at fault: they make theirs at once
AHEAD = 6  # calls: more than there are slots, with tensors at other places, for which graphs are made, and at the same


def late_rank(case: Case, rounds: int, deadline_s: float) -> list[str]:
    """Failures of `rounds` calls in which a random rank is late by up to half the deadline."""
    chance, rank = random.Random(3), dist.get_rank()
    inputs = make_inputs(case, 1, exact=True)
    wanted = expected(case, inputs, torch.float32).to(case.dtype)
    run(case, inputs)  # compiles
    torch.cuda.synchronize()
    dist.barrier()
    failures = []
    for index in range(rounds):
        late, delay_s = chance.randrange(dist.get_world_size()), chance.uniform(0, deadline_s / 2)
        if index >= 2:
            delay_s /= 10  # two full delays, the rest short: the campaign has minutes, not hours
        if rank == late:
            time.sleep(delay_s)
        try:
            if not torch.equal(run(case, inputs), wanted):
                failures.append(f"{case}: wrong result, rank {late} late by {delay_s:.2f} s")
        except PeerError as error:
            failures.append(f"{case}: false alarm: {error}")
    return failures


def absent_rank(case: Case, limit_s: float) -> list[str]:
    """Failures of calls in which the last rank does not take part, and of those after the reset."""

    def calls(inputs: Inputs) -> list[str]:
        if not _is_at_fault():
            places = inputs, inputs._replace(x=inputs.x.clone())
            return _survive(case, partial(_several, case, places), limit_s)
        time.sleep(limit_s)
        return []

    return _computes_again(case, calls)


def _several(case: Case, places: tuple[Inputs, Inputs]) -> torch.Tensor:
    for call in range(AHEAD):
        out = run(case, places[call % 3 % 2])  # each result makes way for the next, which may lie where it did
    return out


def lost_copies(case: Case, ends_s: float, new_kernel: Kernel) -> list[str]:
    """Failures of a call in which what the last rank copies does not arrive, and of one after the reset."""

    def calls(inputs: Inputs) -> list[str]:
        elsewhere = _elsewhere(inputs)
        if not _is_at_fault():
            return _survive(case, lambda: new_kernel(run(case, elsewhere)), ends_s + LATE_S)
        with patch.object(CopyQueue, "launch"):
            run(case, elsewhere)
        time.sleep(ends_s)
        return []

    return _computes_again(case, calls)


def replayed_without_copies(case: Case, limit_s: float) -> list[str]:
    """Failures of the same call in a graph."""

    def calls(inputs: Inputs) -> list[str]:
        graph = torch.cuda.CUDAGraph()
        with patch.object(CopyQueue, "launch") if _is_at_fault() else nullcontext(), torch.cuda.graph(graph):
            out = run(case, inputs)
        dist.barrier()
        if not _is_at_fault():
            return _survive(case, lambda: _replayed(graph, out), limit_s)
        graph.replay()
        time.sleep(limit_s)
        return []

    return _computes_again(case, calls)


def _replayed(graph: torch.cuda.CUDAGraph, out: torch.Tensor) -> torch.Tensor:
    graph.replay()
    torch.cuda.synchronize()  # nobody else waits for what a graph holds
    return out


def _is_at_fault() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _elsewhere(inputs: Inputs) -> Inputs:
    """The same at an address that no call has had, of which no graph is kept: its copies are launched by themselves."""
    room = inputs.x.new_empty(inputs.x.numel() + OFF_ALIGNMENT)
    return inputs._replace(x=room[OFF_ALIGNMENT:].view_as(inputs.x).copy_(inputs.x))


def _computes_again(case: Case, calls: Callable[[Inputs], list[str]]) -> list[str]:
    """Failures of these calls, between others that all ranks make as they should."""
    inputs = make_inputs(case, 2, exact=True)
    wanted = expected(case, inputs, torch.float32).to(case.dtype)
    run(case, inputs)
    torch.cuda.synchronize()
    dist.barrier()
    failures = calls(inputs)
    ow.reset()
    if not torch.equal(run(case, inputs), wanted):
        failures.append(f"{case}: wrong result after the reset")
    return failures


def _survive(case: Case, calls: Callable[[], torch.Tensor], limit_s: float) -> list[str]:
    """Failures of calls that must raise within `limit_s`."""
    started = time.monotonic()
    try:
        out = calls()
        ow.check()
    except PeerError as error:
        took_s = time.monotonic() - started
        named = "late" in str(error) or "waits" in str(error)
        return [] if took_s <= limit_s and named else [f"{case}: {took_s:.1f} s, {error}"]
    return [f"{case}: no error; NaN: {bool(out.isnan().any())}"]


def trials(deadline_s: float, rounds: int, absent: int) -> Iterator[tuple[str, int, Callable[[], list[str]]]]:
    """The line of each, how many calls it is about, and what finds its failures."""
    limit_s = deadline_s + LATE_S
    for case in CASES:
        yield f"late rank, {case.name}", rounds, partial(late_rank, case, rounds, deadline_s)
    for case in spread_over(CASES, absent):
        yield f"absent rank, {case.name}", 1, partial(absent_rank, case, limit_s)
    for case, by_watcher, new_kernel in LOST:
        trial = partial(lost_copies, case, deadline_s + by_watcher * CONTEXT_S * max(1, sharers() - 1), new_kernel)
        yield f"lost copies, {case.name}", 1, trial
    for case, *_ in LOST:
        yield f"lost copies, replayed, {case.name}", 1, partial(replayed_without_copies, case, limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--absent", type=int, default=len(CASES), help="how many cases lose a rank")
    parser.add_argument("--only", default="", help="lines that contain this text")
    arguments = parser.parse_args()
    join(timedelta(seconds=arguments.deadline))
    started = time.monotonic()
    for name, rounds, trial in trials(arguments.deadline, arguments.rounds, arguments.absent):
        if arguments.only in name:
            report.line(name, rounds, trial(), started)
    report.finish()


if __name__ == "__main__":
    main()

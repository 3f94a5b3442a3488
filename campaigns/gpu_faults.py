"""Do calls fail as they should on GPUs? A late rank raises no false alarm; an absent one is found and named.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_faults --deadline 4 [--rounds 6] [--absent 3]

late: one rank comes up to half the deadline late, `--rounds` times: every result is right.
absent: one rank leaves out calls that the others launch, several ahead: they raise PeerTimeout within the deadline +
1.5 s (a stream wait: twice the deadline + 1.5 s), and after a collective reset the group computes again. A case takes
longer than the deadline: `--absent 3` leaves it at three of them, spread over all.
"""

from __future__ import annotations

import argparse
import random
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_exactness import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Case, Inputs, expected, make_inputs, run
from campaigns.gpu_ranks import join, report, spread_over
from overweave.errors import PeerError

CASES = (
    Case(ALL_GATHER, 1000, 512, 512, torch.bfloat16, True, "push"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "scatter"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "scatter sums=epilogue"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "fused_ring"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "remote_add sms=1"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "scatter_stored"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "ring_stored"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "scatter_pull"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "two_shot_stored"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "ring_stored"),
    Case(ALL_GATHER, 1000, 512, 512, torch.bfloat16, True, "push mover=copy_kernel"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "scatter mover=copy_kernel sms=1"),
    Case(ALL_GATHER, 1000, 512, 512, torch.bfloat16, True, "per_shard"),
    Case(ALL_GATHER, 1000, 512, 512, torch.bfloat16, True, "gather_packed"),
    Case(REDUCE_SCATTER, 1000, 512, 512, torch.bfloat16, True, "scatter_packed"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "two_shot"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "one_shot"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "one_shot_pull"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "one_shot_packed"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "two_shot_packed"),
    Case(ALL_REDUCE, 1000, 512, 512, torch.bfloat16, True, "two_shot_pull"),
)

AHEAD = 6  # calls: more than there are slots, with tensors at other places, for which graphs are made, and at the same


def late_rank(case: Case, rounds: int, deadline_s: float) -> list[str]:
    """Failures of `rounds` calls in which a random rank is late by up to half the deadline."""
    chance, rank = random.Random(3), dist.get_rank()
    inputs = make_inputs(case, 1, exact=True)
    wanted = expected(case, inputs, torch.float32).to(case.dtype)
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


def absent_rank(case: Case, deadline_s: float) -> list[str]:
    """Failures of calls in which the last rank does not take part, and of those after the reset."""
    rank, absent = dist.get_rank(), dist.get_world_size() - 1
    inputs = make_inputs(case, 2, exact=True)
    wanted = expected(case, inputs, torch.float32).to(case.dtype)
    run(case, inputs)
    torch.cuda.synchronize()
    failures = []
    limit_s = (2 if case.plan == "per_shard" else 1) * deadline_s + 1.5
    if rank != absent:
        started = time.monotonic()
        failures += _survive(case, inputs, started, limit_s)
    else:
        time.sleep(limit_s + 1)
    ow.reset()
    if not torch.equal(run(case, inputs), wanted):
        failures.append(f"{case}: wrong result after the reset")
    return failures


def _survive(case: Case, inputs: Inputs, started: float, limit_s: float) -> list[str]:
    places = (inputs, inputs._replace(x=inputs.x.clone()))
    try:
        for call in range(AHEAD):
            out = run(case, places[call % 3 % 2])
        ow.check()
    except PeerError as error:
        took_s = time.monotonic() - started
        named = "late" in str(error) or "waits" in str(error)
        return [] if took_s <= limit_s and named else [f"{case}: {took_s:.1f} s, {error}"]
    return [f"{case}: no error; NaN: {bool(out.isnan().any())}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--absent", type=int, default=len(CASES), help="how many cases lose a rank")
    arguments = parser.parse_args()
    join(timedelta(seconds=arguments.deadline))
    started = time.monotonic()
    for case in CASES:
        run(case, make_inputs(case, 0, exact=True))
        torch.cuda.synchronize()
        dist.barrier()
        failures = late_rank(case, arguments.rounds, arguments.deadline)
        report.line(f"late rank, {case.operator}.{case.plan}", arguments.rounds, failures, started)
    for case in spread_over(CASES, arguments.absent):
        failures = absent_rank(case, arguments.deadline)
        report.line(f"absent rank, {case.operator}.{case.plan}", 1, failures, started)
    report.finish()


if __name__ == "__main__":
    main()

"""Do our kernels and another library's collectives get along on the same GPUs, whichever starts first?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_beside                         (1,000 trials of each plan)
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_beside --trials 100 --only matmul_all_reduce

NCCL all-reduces run on another stream, in a group of their own, while our operators run on the caller's, in every plan
that has more than a library collective of its own. Half of the trials begin in one order on all ranks, a quarter theirs
first and a quarter ours; in the others every rank draws for itself which it starts first: kernels that fill every SM
and wait for peers then meet NCCL kernels that hold SMs and wait for peers, in both orders at once. No call may fail or
run out of time, and every result, theirs too, is compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, every_plan
from campaigns.exact.calls import Case, expected, make_inputs, run
from campaigns.gpu_ranks import join, report
from overweave.errors import OverweaveError
from overweave.schedules.records.outside import TORCH_ONE_SHOT, TORCH_TWO_SHOT
from overweave.tuner.measure.baselines import SEQUENTIAL

SHAPES = {ALL_GATHER: (4096, 1024, 2048), REDUCE_SCATTER: (4096, 2048, 1024), ALL_REDUCE: (4096, 2048, 1024)}
FEW_ROWS = 64  # with so few, packed messages leave SMs alone, and their calls become graphs
THEIRS = (1 << 10, 1 << 16, 1 << 22)  # numbers they sum: one SM's worth, a few, many


class Neighbour:
    """The other library: all-reduces of ones in its own group, on its own stream."""

    def __init__(self) -> None:
        self._group, self.stream = dist.new_group(backend="nccl"), torch.cuda.Stream()
        self._tensors = [torch.empty(size, device="cuda") for size in THEIRS]
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def start(self, trial: int) -> None:
        """One all-reduce, compared on its own stream."""
        tensor = self._tensors[trial % len(self._tensors)]
        with torch.cuda.stream(self.stream):
            tensor.fill_(1)
            dist.all_reduce(tensor, group=self._group)
            self.wrong += (tensor != dist.get_world_size()).any()


def cases(only: str) -> Iterator[Case]:
    """Every plan, but for the library's: two of its own groups in different orders are its own affair."""
    for operator, shape in SHAPES.items():
        torchs = (TORCH_ONE_SHOT, TORCH_TWO_SHOT) if operator == ALL_REDUCE else ()
        for plan in (*every_plan(operator), *torchs):
            if plan != SEQUENTIAL and only in f"{operator}.{plan}":
                yield Case(operator, *shape, torch.bfloat16, False, plan)
                if "packed" in plan:
                    yield Case(operator, FEW_ROWS, *shape[1:], torch.bfloat16, False, plan)


def is_theirs_first(trial: int, own: random.Random) -> bool:
    """Which comes first on this rank."""
    return (True, False, own.random() < 0.5, own.random() < 0.5)[trial % 4]


def trials(case: Case, count: int, neighbour: Neighbour) -> list[str]:
    """Failures of `count` calls of ours beside theirs."""
    own = random.Random(dist.get_rank())
    inputs = make_inputs(case, 1, exact=True)
    wanted = expected(case, inputs, torch.float32).to(case.dtype)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    try:
        for trial in range(count):
            theirs_first = is_theirs_first(trial, own)
            if theirs_first:
                neighbour.start(trial)
            out = run(case, inputs)
            if not theirs_first:
                neighbour.start(trial)
            wrong += (out != wanted).any()
            if trial % 8 == 7:
                torch.cuda.synchronize()  # else the host runs far ahead, and few trials start from idle GPUs
        torch.cuda.synchronize()
        ow.check()
    except OverweaveError as error:
        return [str(error)]
    found = (("ours", int(wrong)), ("theirs", int(neighbour.wrong)))
    return [f"{case}: {number} results of {whose} differ" for whose, number in found if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="of each plan")
    parser.add_argument("--only", default="", help="plans whose name, as OPERATOR.PLAN, contains this text")
    arguments = parser.parse_args()
    join(timedelta(seconds=20))
    neighbour = Neighbour()
    for case in cases(arguments.only):
        started = time.monotonic()
        run(case, make_inputs(case, 0, exact=True))
        failures = trials(case, arguments.trials, neighbour)
        name = f"{case.name} m={case.m} beside NCCL"
        report.line(name, arguments.trials, failures, started)
    report.finish()


if __name__ == "__main__":
    main()

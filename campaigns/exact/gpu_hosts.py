"""GPUs of one machine as if they were on several hosts: is every operator exact there, and is two levels quicker?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_hosts [--hosts ab] [--calls 12] [--replays 20]
    torchrun --standalone --nproc-per-node 4 -m campaigns.gpu_hosts --hosts aabb
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_hosts --times

--hosts: a letter a rank; else the first half of them is one host. NCCL takes ranks of unlike letters for ranks of
unlike hosts (NCCL_HOSTID) and reaches them over sockets; overweave maps no memory between them (OVERWEAVE_ISLAND).
calls, replayed: every operator by every plan that reaches no peer of another host, on whole numbers, one rank late;
eager, and in one CUDA graph. --times: two levels beside the library path and the default choice, by turns, at sizes
whose transfer takes about as long as their matmul over a socket of 2.5 GB/s; the median of the slowest rank.
Ranks that share a GPU have gloo as their library, whose calls no graph holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from campaigns.cases import plans_by_island
from campaigns.exact.trials import Tensors, Trial, long_run
from campaigns.gpu_ranks import Check, arguments, integers, join, leave, report, sharers
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.memory.board.records import ISLAND
from overweave.memory.group import resolve
from overweave.ops.dispatch.call import call
from overweave.ops.reference import PlainCollectives
from overweave.tuner.measure.timer import Effort, compare, median

SHAPE = (512, 256, 512)  # m, n, k of the operators' exact calls
EFFORT = Effort(rounds=9, warmup=2, host_calls=0)
# For sockets of 2.5 GB/s and matmuls of 700 TFLOP/s: a gather moves k columns and multiplies by n, a sum moves the n
# columns of products along k; the width that does not travel is chosen so that both take as long.
MOVED, WORKED, ROWS = 4096, 98304, 4096


def given(operator: Operator, shape: tuple[int, int, int], seed: int) -> dict[str, Any]:
    """This rank's tensors, of -1, 0 and 1."""
    group = resolve(None)
    m, n, k = shape
    problem = Problem(operator=operator.name, m=m, n=n, k=k, world_size=group.world_size, dtype="bfloat16")
    own = 100 * seed + group.rank
    return {"x": integers(problem.operand_rows(group.rank), k, seed=own), "w": integers(k, n, seed=own + 50)}


def trial(operator: Operator, plan: str | None) -> Trial:
    def inputs(seed: int) -> Tensors:
        return tuple(given(operator, SHAPE, seed).values())

    def run(tensors: Tensors) -> torch.Tensor:
        y: torch.Tensor = call(operator, None, dict(zip(("x", "w"), tensors, strict=True)) | {"plan": plan})["y"]
        return y

    def exact(seed: int, tensors: Tensors) -> torch.Tensor:
        passed = dict(zip(("x", "w"), tensors, strict=True))
        y: torch.Tensor = operator.reference(passed, PlainCollectives(resolve(None).process_group, SHAPE[0], 0))
        return y

    return Trial(f"{operator.name}.{plan}", inputs, run, exact)


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    trials = [
        trial(operator, plan) for operator in OPERATORS.values() for plan in (None, *plans_by_island(operator.name))
    ]
    for one in trials:
        yield Check(f"calls: {one.name}", partial(long_run, one, asked.calls, False), asked.calls)
    for one in trials if sharers() == 1 else ():
        yield Check(f"replayed: {one.name}", partial(long_run, one, asked.replays, True), asked.replays)


def times() -> Iterator[str]:
    """Microseconds of each operator by the library path, by two levels and as chosen."""
    for operator in OPERATORS.values():
        n, k = (WORKED, MOVED) if operator.gathers else (MOVED, WORKED)
        tensors = given(operator, (ROWS, n, k), seed=0)
        calls = {
            str(plan): lambda turn, own=tensors | {"plan": plan}, one=operator: call(one, None, own)
            for plan in ("sequential", "islands", "islands pieces=2", None)
        }
        samples = compare(calls, torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD, EFFORT)
        found = {name: median(values) for name, values in samples.device_us.items()}
        beside = " | ".join(f"{name} {us:9.0f} us {found['sequential'] / us:5.2f}" for name, us in found.items())
        yield f"{operator.name:24s} {ROWS} x {n} x {k}: {beside}"


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=30)
    parser.add_argument("--hosts", default="")
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--times", action="store_true")
    asked = parser.parse_args()
    rank, ranks = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    host = asked.hosts[rank] if asked.hosts else "ab"[2 * rank >= ranks]
    os.environ |= {"NCCL_HOSTID": f"host-{host}", ISLAND: host}
    join(timedelta(seconds=asked.deadline))
    if not asked.times:
        report.run(check for check in checks(asked) if asked.only in check.name)
        report.finish()
    for line in times():
        if dist.get_rank() == 0:
            print(line, flush=True)
    leave()


if __name__ == "__main__":
    main()

"""Packed messages on GPUs: are all bits right, whatever runs between them, and how quick are small all-reduces?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_packed

exact: shapes from one row on, odd ones and primes, each packed plan between calls of plans with slots and credits.
late: thousands of calls with a rank that comes late. replays: graphs between eager calls of other sizes. absent: a call
that one rank leaves out raises within the deadline and names it; after a reset all is well.
latency: captured graphs at decoding sizes, beside cuBLAS with NCCL's all-reduce and with torch's, paired, slowest rank.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_exactness import ALL_GATHER, ALL_REDUCE, Case, expected, is_bit_equal, long_run, make_inputs, run
from campaigns.gpu_faults import absent_rank
from campaigns.gpu_ranks import join, report
from overweave.memory.group import Group, resolve
from overweave.tuner.attempt import Result
from overweave.tuner.baselines import planned
from overweave.tuner.replay import replayed
from overweave.tuner.sides import Setting, side
from overweave.tuner.statistics import median
from overweave.tuner.timer import Effort, compare

PACKED = ("one_shot_packed", "two_shot_packed")
BETWEEN = (
    (ALL_REDUCE, "one_shot_pull"),
    (ALL_REDUCE, "two_shot"),
    (ALL_GATHER, "push"),
    (ALL_GATHER, "gather_pull"),
    (ALL_REDUCE, "sequential"),
)
PRIMES = (1, 1, 2, 3, 5, 7, 13, 31, 61, 127, 257, 509)
# n and a rank's part of k at tensor parallel 4: `o` and `down` of Llama-3-8B, then of 70B.
LAYERS = ((4096, 1024), (4096, 3584), (8192, 2048), (8192, 7168))
ROWS = (1, 8, 64, 256, 512)
EFFORT = Effort(rounds=30, warmup=5, host_calls=0)


def mixed_cases(count: int, seed: int) -> Iterator[tuple[Case, Case]]:
    """A packed case and one that runs behind it."""
    chance = random.Random(seed)
    for index in range(count):
        m = chance.choice(PRIMES) if index % 3 else chance.randint(1, 600)
        n, k = 8 * chance.randint(1, 300), 8 * chance.randint(1, 64)
        dtype, is_transposed = chance.choice((torch.bfloat16, torch.float16)), chance.random() < 0.5
        operator, plan = BETWEEN[index % len(BETWEEN)]
        yield (
            Case(ALL_REDUCE, m, n, k, dtype, is_transposed, PACKED[index % len(PACKED)]),
            Case(operator, chance.randint(1, 600), 8 * chance.randint(1, 64), k, dtype, is_transposed, plan),
        )


def exact(shapes: int) -> list[str]:
    """Cases that were not bit-equal on some rank."""
    wrong = []
    for index, pair in enumerate(mixed_cases(shapes, seed=11)):
        for turn, case in enumerate((*pair, pair[0])):
            if not report.all_agree(is_bit_equal(case, 3 * index + turn)):
                wrong.append(f"{index}.{turn}: {case}")
    return wrong


def interleaved(plan: str, turns: int) -> int:
    """How many results differ of replays of one graph of three calls, with eager calls of other sizes in between."""
    cases = (
        Case(ALL_REDUCE, 64, 2048, 256, torch.bfloat16, True, plan),
        Case(ALL_REDUCE, 33, 512, 256, torch.bfloat16, True, "one_shot_pull"),
        Case(ALL_REDUCE, 1, 1024, 256, torch.bfloat16, True, plan),
    )
    eager = Case(ALL_REDUCE, 7, 4096, 256, torch.bfloat16, True, plan)
    inputs = [make_inputs(case, index, exact=True) for index, case in enumerate((*cases, eager))]
    wanted = [
        expected(case, given, torch.float32).to(case.dtype) for case, given in zip((*cases, eager), inputs, strict=True)
    ]
    for case, given in zip((*cases, eager), inputs, strict=True):
        run(case, given)
    torch.cuda.synchronize()
    dist.barrier()
    graph, chance = torch.cuda.CUDAGraph(), random.Random(5)
    with torch.cuda.graph(graph):
        results = [run(case, given) for case, given in zip(cases, inputs[:3], strict=True)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(turns):
        # Drawn on every rank, also where nobody is late: all must make the same calls.
        late, cycles = chance.randrange(3 * dist.get_world_size()), chance.randint(10_000, 300_000)
        if late == dist.get_rank():
            torch.cuda._sleep(cycles)
        for _ in range(chance.randrange(3)):
            differing += (run(eager, inputs[3]) != wanted[3]).any()
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for result, right in zip(results, wanted[:3], strict=True):
            differing += (result != right).any()
    torch.cuda.synchronize()
    return int(differing)


def latencies(group: Group, device: torch.device) -> Iterator[str]:
    """A line per shape: microseconds of each method, and how many times quicker the best packed plan is."""

    def operator(
        x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, m: int, plan: str | None
    ) -> torch.Tensor:
        return ow.matmul_all_reduce(x, w, group, plan=plan)

    setting = Setting(group=group, device=device, dtype=torch.bfloat16, operator=operator)
    yield f"{'rows':>4} {'n':>5} {'k':>5}  {'matmul':>8} {'nccl':>8} {'torch 1':>8} {'torch 2':>8}  plans, us"
    for rows in ROWS:
        for n, k in LAYERS:
            one = side(ALL_REDUCE, rows, n, k * group.world_size, setting)
            calls: dict[str, Callable[[int], Result]] = {
                "matmul": one.matmul,
                "nccl": one.sequential,
                "torch one-shot": one.torch_one_shot,
                "torch two-shot": one.torch_two_shot,
            }
            plans = (*PACKED, "one_shot_pull")
            calls |= {plan: planned(plan)(one) for plan in plans}
            for call in calls.values():
                call(0)
            took = compare(
                {name: replayed(call) for name, call in calls.items()}, device, group.process_group, EFFORT
            ).device_us
            us = {name: median(values) for name, values in took.items()}
            theirs, ours = min([us[name] for name in list(calls)[1:4]]), min(us[plan] for plan in PACKED)
            told = "  ".join(f"{plan} {us[plan]:.1f}" for plan in plans)
            base = " ".join(f"{us[name]:8.1f}" for name in list(calls)[:4])
            yield f"{rows:4d} {n:5d} {k:5d}  {base}  {told}  {theirs / ours:.2f} x the best of theirs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--deadline", type=float, default=6.0)
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    arguments = parser.parse_args()
    device, started = join(timedelta(seconds=arguments.deadline)), time.monotonic()
    if arguments.shapes:
        report.line("exact, between other plans", 3 * arguments.shapes, exact(arguments.shapes), started)
    for plan in PACKED:
        case = Case(ALL_REDUCE, 61, 1032, 512, torch.bfloat16, True, plan)
        differing = report.total(long_run(case, arguments.calls, False)) if arguments.calls else 0
        told = [f"{differing} differ"] if differing else []
        report.line(f"{plan}: calls with a late rank", arguments.calls, told, started)
        differing = report.total(interleaved(plan, arguments.replays)) if arguments.replays else 0
        told = [f"{differing} differ"] if differing else []
        report.line(f"{plan}: replays between eager calls", arguments.replays, told, started)
    if not arguments.no_latency:
        for line in latencies(resolve(None), device):
            if dist.get_rank() == 0:
                print(line, flush=True)
    ow.check()
    if not arguments.no_faults:
        for plan in PACKED:
            case = Case(ALL_REDUCE, 100, 512, 512, torch.bfloat16, True, plan)
            report.line(f"{plan}: absent rank", 1, absent_rank(case, arguments.deadline), started)
    report.finish()


if __name__ == "__main__":
    main()

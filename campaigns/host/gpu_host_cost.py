"""What a call costs beyond its work: the host's time of an eager call, and the gaps between the kernels of a replay.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_host_cost [--rows M] [--only TEXT]

host: of an eager call whose tensors come back, in bursts that nobody waits for; the median burst, the slowest rank.
step: of the call with every graph forbidden, as the first calls run. replay: a graph of 100 calls, captured by the
caller, between events, per call. kernels: of the same graph, the time in which any kernel or copy of it runs, as
torch's profiler saw it. beyond: replay less kernels.
The last lines say whether every host is at most 30 us, and whether every beyond is at most 8 us; exit 1 if not.
`python -m campaigns.host_path` on the same host says how much of a call is Python.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import overweave as ow
from campaigns.gpu_ranks import join, leave
from campaigns.host.host_cases import CASES, PLAIN_CASES, Case, Sizes, call_of
from campaigns.verdict import Verdict, tell
from overweave.errors import OverweaveError
from overweave.ops.call import prepared

HOST_US, BEYOND_US = 30.0, 8.0
BURST, BURSTS, WARM, WARM_CALLS = 16, 15, 8, 2000
REPLAYED, REPLAYS = 100, 7
Call = Callable[[], object]
Interval = tuple[float, float]


class Cost(NamedTuple):
    """Microseconds of one call; None: not known."""

    host_us: float
    stepwise_us: float
    replay_us: float
    kernels_us: float | None

    @property
    def beyond_us(self) -> float | None:
        return None if self.kernels_us is None else self.replay_us - self.kernels_us

    def line(self, case: Case) -> str:
        return " ".join(["      -" if us is None else f"{us:7.1f}" for us in (*self, self.beyond_us)] + [f" {case}"])


HEADER = "   host    step  replay kernels  beyond  us a call"


def busy(intervals: Iterable[Interval]) -> float:
    """How long at least one of the intervals lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def verdicts(costs: dict[str, Cost]) -> list[Verdict]:
    """Whether each budget is kept."""
    beyond = {name: cost.beyond_us for name, cost in costs.items() if cost.beyond_us is not None}
    host = {name: cost.host_us for name, cost in costs.items()}
    return [_verdict("host of an eager call", host, HOST_US), _verdict("replay beyond its kernels", beyond, BEYOND_US)]


def _verdict(what: str, found: dict[str, float], most: float) -> Verdict:
    if not found:
        return Verdict(what, "nothing was measured", False)
    over, worst = sum(us > most for us in found.values()), max(found, key=lambda name: found[name])
    told = f"at most {most:g} us, worst {found[worst]:.1f} ({worst}), {over} of {len(found)} above"
    return Verdict(what, told, not over)


def host_us(call: Call) -> float:
    """Of a call, in bursts that nobody waits for; the median burst, the slowest rank."""
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter_ns() - start_ns) / BURST / 1e3)
    torch.cuda.synchronize()
    return slowest(sorted(times)[len(times) // 2])


def slowest(us: float) -> float:
    """The largest over ranks."""
    found = torch.tensor(us, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of the caller's, of many calls."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            call()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Of one call of a graph."""
    begin, end, one = torch.cuda.Event(True), torch.cuda.Event(True), torch.ones(1, device="cuda")
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        dist.all_reduce(one, dist.ReduceOp.MAX)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPLAYED)
    return slowest(sorted(times)[len(times) // 2])


def kernels_us(graph: torch.cuda.CUDAGraph) -> float | None:
    """The time in which kernels and copies of one call run; None where the profiler sees none of them."""
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
    except RuntimeError as error:  # a machine may keep its profiler to itself
        print(f"rank {dist.get_rank()}: no profile: {error}", flush=True)
        return None
    ran = [event.time_range for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    found = busy((each.start, each.end) for each in ran) / REPLAYED
    found = slowest(found if len(ran) >= REPLAYED else 0.0)
    return found or None


def cost_of(case: Case, sizes: Sizes) -> Cost:
    """Collective."""
    group = dist.group.WORLD
    assert group is not None
    call = call_of(case, group, sizes)
    for _ in range(WARM):
        call()
    ow.check()
    eager_us = stepwise_us = host_us(call)
    bound: Any = prepared.CALLS[group].latest().bound
    if getattr(bound, "_may_replay", False):
        bound._may_replay = False
        call()
        stepwise_us = host_us(call)
        bound._may_replay = True
    graph = captured(call)
    graph.replay()
    cost = Cost(eager_us, stepwise_us, replay_us(graph), kernels_us(graph))
    ow.check()
    return cost


def warm(sizes: Sizes) -> None:
    """So that torch, the library and the clocks have their stride, whatever is measured first. Collective."""
    group = dist.group.WORLD
    assert group is not None
    for case in PLAIN_CASES:
        call = call_of(case, group, sizes)
        for _ in range(WARM_CALLS):
            call()
    one = torch.ones(1, device="cuda")
    kernels_us(captured(lambda: one.add_(1)))  # the first profile of a process counts its own start, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--only", default="", help="only cases that contain this")
    asked = parser.parse_args()
    join(timedelta(seconds=20))
    sizes = Sizes(dist.get_world_size(), asked.rows, asked.n, asked.k, "cuda")
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{sizes.ranks} x {torch.cuda.get_device_name()}, {sizes.m}x{sizes.n}x{sizes.k} a rank\n{HEADER}")
    costs: dict[str, Cost] = {}
    with torch.no_grad():
        warm(sizes)
        for case in (each for each in CASES if asked.only in str(each)):
            try:
                costs[str(case)] = cost_of(case, sizes)
            except OverweaveError as error:
                print(f"rank {dist.get_rank()}: {case}: {error}", flush=True)
                break
            if is_first:
                print(costs[str(case)].line(case), flush=True)
    code = tell(verdicts(costs), is_quiet=not is_first)
    leave()
    sys.exit(code)


if __name__ == "__main__":
    main()

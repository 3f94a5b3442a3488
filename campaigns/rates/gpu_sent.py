"""How fast tokens travel to experts of other ranks and back, beside the copy engine and the library's way.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_sent [--tokens 4096] [--hidden 7168] [--sms 8 12 16]

Every token goes to every rank. Each call is one CUDA graph, but for the library's, which looks at counts. GB/s count
the rows that leave a rank, on the slowest one. Then small numbers of tokens, dispatch and combine in one graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import join, leave
from overweave import moe
from overweave.memory.group import resolve
from overweave.tuner.measure.baselines import PeerCopies
from overweave.tuner.measure.timer import Effort, compare, median

EFFORT = Effort(rounds=15, warmup=3, host_calls=0)
TOP, EXPERTS_A_RANK, SMALL = 8, 32, (1, 8, 32, 64, 128, 256)
Call = Callable[[int], object]


def as_graph(call: Callable[[], object]) -> Call:
    """A call as a graph, which nobody reads the results of."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        kept.append(call())

    def replay(turn: int) -> object:
        graph.replay()
        return kept

    return replay


def called(call: Callable[[], object], plan: moe.Push | None) -> Call:
    """A call that is measured: as a graph, if its plan can be one."""
    return (lambda turn: call()) if plan is None else as_graph(call)


def given(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens whose experts lie on as many ranks as there are, in turn."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(tokens, hidden, device="cuda", generator=draw).bfloat16()
    slots = torch.arange(TOP, device="cuda")
    ids = (slots % ranks) * EXPERTS_A_RANK + torch.randint(
        0, EXPERTS_A_RANK // TOP, (tokens, TOP), device="cuda", generator=draw
    ) * TOP
    return x, (ids + slots).int(), torch.rand(tokens, TOP, device="cuda", generator=draw)


def measured(calls: dict[str, Call]) -> dict[str, float]:
    """Microseconds of each, on the slowest rank, all by turns."""
    samples = compare(calls, torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD, EFFORT)
    return {name: median(values) for name, values in samples.device_us.items()}


def large(tokens: int, hidden: int, sms: list[int]) -> Iterator[str]:
    ranks = dist.get_world_size()
    x, ids, weights = given(tokens, hidden)
    size = tokens * hidden * x.element_size()
    copies = PeerCopies(resolve(None), x.device, size, lambda peer: (0, 0, size))
    words = x.view(torch.int32)

    def by_engine(turn: int) -> None:
        copies.start(words)
        copies.join()

    calls: dict[str, Call] = {"copy engine": by_engine}
    most, experts = tokens * ranks, EXPERTS_A_RANK * ranks
    plans: list[moe.Push | None] = [None, *(moe.Push(sms=each) for each in sms)]
    for plan in plans:
        sent = moe.dispatch(x, ids, weights, experts, most=most, plan=plan)
        there = partial(moe.dispatch, x, ids, weights, experts, most=most, plan=plan)
        back = partial(moe.combine, sent.x.clone(), sent)
        name = "sequential" if plan is None else f"push, {plan.sms} SMs"
        calls |= {f"{what} {name}": called(call, plan) for what, call in (("dispatch", there), ("combine", back))}
    times = measured(calls)
    rate = size * (ranks - 1) / 1e3
    engine = rate / times["copy engine"]
    for name, us in times.items():
        yield f"{name:<28} {us:9.1f} us {rate / us:8.1f} GB/s {rate / us / engine:6.2f} of the copy engine"


def small(hidden: int, sms: int) -> Iterator[str]:
    ranks = dist.get_world_size()
    for tokens in SMALL:
        x, ids, weights = given(tokens, hidden)

        def there_and_back(plan: moe.Push | None) -> torch.Tensor:
            sent = moe.dispatch(x, ids, weights, EXPERTS_A_RANK * ranks, most=tokens * ranks, plan=plan)  # noqa: B023
            return moe.combine(sent.x, sent)

        plans = {"push": moe.Push(sms=sms), "sequential": None}
        calls = {name: called(partial(there_and_back, plan), plan) for name, plan in plans.items()}
        times = measured(calls)
        yield f"{tokens:4d} tokens, there and back: " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.gpu_sent", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--sms", type=int, nargs="+", default=[8, 12, 16])
    asked = parser.parse_args()
    join(timedelta(seconds=60))
    for line in (*large(asked.tokens, asked.hidden, asked.sms), *small(asked.hidden, asked.sms[-1])):
        if dist.get_rank() == 0:
            print(line, flush=True)
    leave()


if __name__ == "__main__":
    main()

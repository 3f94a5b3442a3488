"""Kernels fused by hand with the tile primitives on GPUs: those of examples/tile_kernels, against torch.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_tile_kernels [--calls 12] [--late 0.2]

Each is called again and again with fresh data, and in every third call one rank comes `--late` seconds late; then it
is captured in a graph and replayed. Data are small whole numbers where sums are exact. Last, one rank leaves out a
call: the others raise PeerTimeout within the group's timeout, and after a reset all is well. Under a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import integers, join, report, shard
from examples.tile_kernels.all_gather_experts import AllGatherExperts
from examples.tile_kernels.gathered_attention import GatheredAttention
from examples.tile_kernels.matmul_ring_reduce_scatter import MatmulReduceScatter
from overweave.errors import PeerError

DEADLINE_S = 8.0
LAUNCH: dict[str, Any] = {"num_warps": 8, "num_stages": 3}
Inputs = tuple[torch.Tensor, ...]


class Trial(NamedTuple):
    """inputs: fresh ones from a seed. run: the kernel. exact: what plain torch makes of them. tolerance: absolute."""

    name: str
    inputs: Callable[[int], Inputs]
    run: Callable[..., torch.Tensor]
    exact: Callable[[int], torch.Tensor]
    tolerance: float


def ring_trial(m: int, n: int, k: int) -> Trial:
    operator = MatmulReduceScatter(m, n, torch.bfloat16, block=(128, 128), moved=(64, 128), ring=20)

    def inputs(seed: int) -> Inputs:
        own = seed + 1000 * dist.get_rank()
        return integers(m, k, seed=own), integers(k, n, seed=own + 500)

    def exact(seed: int) -> torch.Tensor:
        a, b = inputs(seed)
        total = a.float() @ b.float()
        dist.all_reduce(total)
        return shard(total)

    return Trial(f"matmul + ring reduce-scatter {m}x{n}x{k}", inputs, lambda a, b: operator(a, b, **LAUNCH), exact, 0.0)


def experts_trial(m: int, topk: int, experts: int, h: int, d: int) -> Trial:
    operator = AllGatherExperts((m, topk, experts, h, d), torch.bfloat16, block=128, moved=(64, 128))

    def whole(seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed + 7)
        chosen = torch.rand(m, experts, generator=generator, device="cuda").topk(topk).indices
        return integers(m, h, seed=seed), chosen, integers(experts, h, d, seed=seed + 500 + dist.get_rank())

    def inputs(seed: int) -> Inputs:
        tokens, chosen, weights = whole(seed)
        return shard(tokens), chosen, weights

    def exact(seed: int) -> torch.Tensor:
        tokens, chosen, weights = whole(seed)
        pairs, expert = tokens.float().repeat_interleave(topk, 0), chosen.flatten()
        out = pairs.new_empty(m * topk, d)
        for one in range(experts):
            out[expert == one] = pairs[expert == one] @ weights[one].float()
        return out

    return Trial(
        f"all-gather + experts {m} of {h}, {experts} experts", inputs, lambda *x: operator(*x, **LAUNCH), exact, 0.0
    )


def attention_trial(each: int, heads: int, dim: int) -> Trial:
    length = each * dist.get_world_size()
    operator = GatheredAttention((length, heads, dim), torch.bfloat16)

    def whole(seed: int) -> Inputs:
        return tuple(integers(length, heads, dim, seed=seed + one) / 2 for one in range(3))

    def exact(seed: int) -> torch.Tensor:
        q, k, v = (x.float().transpose(0, 1) for x in whole(seed))
        return shard(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1))

    def inputs(seed: int) -> Inputs:
        return tuple(shard(x) for x in whole(seed))

    return Trial(f"gathered attention {length}x{heads}x{dim}", inputs, lambda *x: operator(*x, **LAUNCH), exact, 0.03)


def wrong(trial: Trial, seed: int, found: torch.Tensor) -> str:
    """What is wrong with a result; nothing if it is right."""
    error = float((found.float() - trial.exact(seed)).abs().max())
    return "" if error <= trial.tolerance else f"seed {seed}: off by {error}"


def fresh(trial: Trial, calls: int, late_s: float) -> list[str]:
    """Failures of calls with fresh data; in every third one a rank is late."""
    failures = []
    for call in range(calls):
        seed = 17 * call
        given = trial.inputs(seed)
        torch.cuda.synchronize()
        if call % 3 == 2 and call // 3 % dist.get_world_size() == dist.get_rank():
            time.sleep(late_s)
        failures.append(wrong(trial, seed, trial.run(*given)))
    return [failure for failure in failures if failure]


def replayed(trial: Trial, replays: int) -> list[str]:
    """Failures of a captured call, replayed with fresh data in the same places."""
    given = trial.inputs(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = trial.run(*given)
    failures = []
    for replay in range(replays):
        for place, data in zip(given, trial.inputs(1000 + replay), strict=True):
            place.copy_(data)
        graph.replay()
        failures.append(wrong(trial, 1000 + replay, found))
    return [failure for failure in failures if failure]


def left_out(trial: Trial) -> list[str]:
    """Failures of a call that the last rank leaves out, and of the call after the reset."""
    given, failures = trial.inputs(3), []
    torch.cuda.synchronize()
    began_s = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(DEADLINE_S / 2)  # at the reset it waits for its peers, and no longer than they wait for it here
    else:
        try:
            trial.run(*given)
            ow.check()
            failures.append("a call without a peer raised nothing")
        except PeerError:
            pass
        if time.monotonic() - began_s > 2 * DEADLINE_S + 3:
            failures.append(f"it was found out after {time.monotonic() - began_s:.1f} s")
    ow.reset()
    failure = wrong(trial, 3, trial.run(*given))
    return [*failures, failure] if failure else failures


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.exact.gpu_tile_kernels", description=__doc__)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--late", type=float, default=0.2, help="seconds")
    arguments = parser.parse_args()
    join(timedelta(seconds=DEADLINE_S))
    rows = 8192 // dist.get_world_size()  # a slot holds 4,096 signals, and the ring has one for each tile of each rank
    trials = (ring_trial(rows, 2048, 512), experts_trial(4096, 2, 8, 1024, 768), attention_trial(2048, 8, 128))
    for trial in trials:
        started = time.monotonic()
        report.line(trial.name, arguments.calls, fresh(trial, arguments.calls, arguments.late), started)
    for trial in trials:
        started = time.monotonic()
        report.line(f"{trial.name}, replayed", arguments.calls, replayed(trial, arguments.calls), started)
    started = time.monotonic()
    report.line("a call that a rank leaves out", 1, left_out(trials[0]), started)
    ow.check()
    report.finish()


if __name__ == "__main__":
    main()

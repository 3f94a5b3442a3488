"""Kernels fused by hand with the tile primitives on GPUs: those of examples/tile_kernels, against torch.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_tile_kernels [--calls 12] [--late 0.2]

Each is called again and again with fresh data, and now and then one rank comes up to `--late` seconds late; then it is
captured in a graph and replayed. Data are small whole numbers where sums are exact. Last, one rank leaves out a
call: the others raise PeerTimeout within the group's timeout, and after a reset all is well. Under a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.exact.trials import Tensors, Trial, is_at_fault, long_run
from campaigns.gpu_ranks import Check, arguments, integers, run_campaign, shard
from examples.tile_kernels.all_gather_experts import AllGatherExperts
from examples.tile_kernels.gathered_attention import GatheredAttention
from examples.tile_kernels.matmul_ring_reduce_scatter import MatmulReduceScatter
from overweave.errors import PeerError

DEADLINE_S = 8.0
LAUNCH = {"num_warps": 8, "num_stages": 3}
CYCLES = 2e9  # a second of a GPU
Sizes = tuple[int, ...]
Options = dict[str, Any]


def ring_trial(sizes: Sizes, made: Options, launch: Options) -> Trial:
    m, n, k = sizes
    operator = MatmulReduceScatter(m, n, torch.bfloat16, **made)

    def inputs(seed: int) -> Tensors:
        own = seed + 1000 * dist.get_rank()
        return integers(m, k, seed=own), integers(k, n, seed=own + 500)

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        a, b = given
        total: torch.Tensor = a.float() @ b.float()
        dist.all_reduce(total)
        return shard(total)

    return Trial(f"matmul + ring reduce-scatter {m}x{n}x{k}", inputs, lambda given: operator(*given, **launch), exact)


def experts_trial(sizes: Sizes, made: Options, launch: Options) -> Trial:
    """Tokens that go anywhere; of every third seed all to the first experts, the others have none."""
    m, topk, experts, h, d = sizes
    operator = AllGatherExperts((m, topk, experts, h, d), torch.bfloat16, **made)

    def whole(seed: int) -> tuple[torch.Tensor, ...]:
        tokens, weights = integers(m, h, seed=seed), integers(experts, h, d, seed=seed + 500 + dist.get_rank())
        generator = torch.Generator(tokens.device).manual_seed(seed + 7)
        chosen = torch.rand(m, experts, generator=generator, device=tokens.device).topk(topk).indices
        if seed % 3 == 2:
            chosen[:] = torch.arange(topk, device=tokens.device)
        return tokens, chosen, weights

    def inputs(seed: int) -> Tensors:
        tokens, chosen, weights = whole(seed)
        return shard(tokens), chosen, weights

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        tokens, chosen, weights = whole(seed)
        pairs, expert = tokens.float().repeat_interleave(topk, 0), chosen.flatten()
        out = pairs.new_empty(m * topk, d)
        for one in range(experts):
            out[expert == one] = pairs[expert == one] @ weights[one].float()
        return out

    name = f"all-gather + experts {m} of {h}, {experts} experts"
    return Trial(name, inputs, lambda given: operator(*given, **launch), exact)


def attention_trial(sizes: Sizes, made: Options, launch: Options) -> Trial:
    length, heads, dim = sizes
    operator, off = GatheredAttention((length, heads, dim), **made), 0.03 if made["dtype"] == torch.bfloat16 else 1e-5

    def whole(seed: int) -> tuple[torch.Tensor, ...]:
        return tuple(integers(*sizes, seed=3 * seed + one).to(made["dtype"]) / 2 for one in range(3))

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        q, k, v = (x.float().transpose(0, 1) for x in whole(seed))
        return shard(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1))

    def inputs(seed: int) -> Tensors:
        return tuple(shard(x) for x in whole(seed))

    return Trial(f"gathered attention {sizes}", inputs, lambda given: operator(*given, **launch), exact, off)


MADE: dict[Callable[[Sizes, Options, Options], Trial], Options] = {
    ring_trial: {"block": (128, 128), "moved": (64, 128), "ring": 20},
    experts_trial: {"block": 128, "moved": (64, 128)},
    attention_trial: {"dtype": torch.bfloat16},
}


def left_out(trial: Trial) -> list[str]:
    """What is wrong with a call that the last rank leaves out, and with the call behind the reset."""
    given, failures = trial.inputs(3), list[str]()
    torch.cuda.synchronize()
    began_s = time.monotonic()
    if is_at_fault():
        time.sleep(DEADLINE_S / 2)  # at the reset it waits for its peers, and no longer than they wait for it here
    else:
        try:
            trial.run(given)
            ow.check()
            failures.append("a call without a peer raised nothing")
        except PeerError:
            pass
        if time.monotonic() - began_s > 2 * DEADLINE_S + 3:
            failures.append(f"it was found out after {time.monotonic() - began_s:.1f} s")
    ow.reset()
    if trial.differs(trial.run(given), trial.exact(3, given)):
        failures.append("wrong result behind the reset")
    return failures


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    ranks = dist.get_world_size()
    rows = 8192 // ranks  # a slot holds 4,096 signals, and the ring has one for each tile of each rank
    sizes = (rows, 2048, 512), (4096, 2, 8, 1024, 768), (2048 * ranks, 8, 128)
    trials = [trial(own, made, LAUNCH) for (trial, made), own in zip(MADE.items(), sizes, strict=True)]
    for is_replayed, words in ((False, ""), (True, ", replayed")):
        for trial in trials:
            calls = partial(long_run, trial, asked.calls, is_replayed, int(asked.late * CYCLES))
            yield Check(trial.name + words, calls, asked.calls)
    yield Check("a call that a rank leaves out", partial(left_out, trials[0]), 1)


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=DEADLINE_S)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--late", type=float, default=0.2, help="seconds")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()

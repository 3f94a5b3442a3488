"""Layers of experts among GPUs: exact, on time, in graphs, with late ranks and absent ones.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_experts [--cases 20] [--calls 12] [--late 0.1]

exact: random layers in bf16, tensor and expert parallel by every plan, all gradients, against a loop over pairs.
calls: one larger layer again and again with fresh tokens and fresh routings, one rank late; then captured in one graph
and replayed, which fails if the host looks at a routing. absent: one rank leaves out calls, and its peers say so in
time. Ranks that share a GPU have gloo as their library, whose calls no graph holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from campaigns.exact import moe_exactness
from campaigns.exact.trials import LATE_S, Tensors, Trial, absent_rank, long_run
from campaigns.gpu_ranks import Check, arguments, integers, run_campaign, shard, sharers
from overweave import moe

DEADLINE_S = 8.0
CYCLES = 2e9  # a second of a GPU
TOKENS, TOP, EXPERTS, HIDDEN, INNER = 1024, 2, 8, 512, 256  # inner: of each rank


def weights_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of the two weights of all experts; of the second most are zeros, so that sums stay exact."""
    own = 1000 * dist.get_rank() + seed
    up, down = integers(EXPERTS, INNER, HIDDEN, seed=own), integers(EXPERTS, HIDDEN, INNER, seed=own + 500)
    return up * sparse(up, own + 1, 8), down * sparse(down, own + 2, 32)


def sparse(like: torch.Tensor, seed: int, one_of: int) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return (torch.randint(0, one_of, like.shape, generator=draw, device="cuda") == 0).to(like.dtype)


def layer_trial(plan: str, skewed: bool) -> Trial:
    """A layer, whole: gather, two matmuls, weighed sum, scatter."""

    def whole(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draw = torch.Generator("cuda").manual_seed(seed + 7)
        scores = torch.rand(TOKENS, EXPERTS, generator=draw, device="cuda")
        if skewed:
            scores = scores + 2.0 / torch.arange(1, EXPERTS + 1, device="cuda")
        weights = torch.randint(0, 2, (TOKENS, TOP), generator=draw, device="cuda").float()
        x = integers(TOKENS, HIDDEN, seed=seed)
        return x * sparse(x, seed + 3, 8), scores.topk(TOP).indices.int(), weights

    def inputs(seed: int) -> Tensors:
        return (*(shard(each) for each in whole(seed)), *weights_of(seed))

    def run(given: Tensors) -> torch.Tensor:
        x, ids, weights, up, down = given
        h, routed = moe.all_gather_experts(x, ids, up, plan=plan)
        return moe.experts_reduce_scatter(h, routed, weights, down, plan=plan)

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        (x, ids, weights), (up, down) = whole(seed), weights_of(seed)
        total = torch.zeros(TOKENS, HIDDEN, device="cuda")
        for slot in range(TOP):
            for expert in range(EXPERTS):
                its = ids[:, slot] == expert
                h = x[its].float() @ up[expert].float().t()
                total[its] += (h @ down[expert].float().t()) * weights[its, slot, None]
        dist.all_reduce(total)
        return shard(total)

    return Trial(f"layer of experts, {plan}{', skewed' * skewed}", inputs, run, exact)


def chain_trial() -> Trial:
    """The same layer at once."""
    halves = layer_trial("push", skewed=True)

    def run(given: Tensors) -> torch.Tensor:
        x, ids, weights, up, down = given
        return moe.experts_mlp(x, ids, weights, moe.ExpertWeights(up, down), plan="push")

    return halves._replace(name="layer of experts at once, push", run=run)


def held_trial() -> Trial:
    """Experts that ranks hold whole, by one chain."""
    halves, ranks = layer_trial("push", skewed=True), dist.get_world_size()
    held = EXPERTS // ranks

    def inputs(seed: int) -> Tensors:
        x, ids, weights, *_ = halves.inputs(seed)
        return (x, ids, weights, *whole_weights(seed, held * dist.get_rank(), held))

    def whole_weights(seed: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        up, down = integers(EXPERTS, INNER, HIDDEN, seed=seed), integers(EXPERTS, HIDDEN, INNER, seed=seed + 500)
        own = slice(first, first + count)
        return (up * sparse(up, seed + 1, 8))[own].contiguous(), (down * sparse(down, seed + 2, 32))[own].contiguous()

    def run(given: Tensors) -> torch.Tensor:
        x, ids, weights, up, down = given
        layer = moe.ExpertWeights(up, down, first=held * dist.get_rank())
        return moe.experts_mlp(x, ids, weights, layer, plan="push")

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        x, ids, weights, *_ = given
        up, down = whole_weights(seed, 0, EXPERTS)
        total = torch.zeros_like(x, dtype=torch.float32)
        for slot in range(TOP):
            for expert in range(EXPERTS):
                its = ids[:, slot] == expert
                h = x[its].float() @ up[expert].float().t()
                total[its] += (h @ down[expert].float().t()) * weights[its, slot, None]
        return total

    return Trial("whole experts, push", inputs, run, exact)


def sent_trial(plan: str) -> Trial:
    """Tokens to experts of other ranks, and back."""

    def inputs(seed: int) -> Tensors:
        own = seed + 100 * dist.get_rank()
        draw = torch.Generator("cuda").manual_seed(own)
        shape = (TOKENS, TOP)
        return (
            integers(TOKENS, HIDDEN, seed=own),
            torch.randint(-1, EXPERTS, shape, generator=draw, device="cuda", dtype=torch.int32),
            torch.randint(0, 3, shape, generator=draw, device="cuda").float(),
        )

    def run(given: Tensors) -> torch.Tensor:
        x, ids, weights = given
        sent = moe.dispatch(x, ids, weights, EXPERTS, most=TOKENS * dist.get_world_size(), plan=plan)
        assert sent.topk_weights is not None
        return moe.combine((sent.x.float() * sent.topk_weights.sum(1, keepdim=True)).to(x.dtype), sent)

    def exact(seed: int, given: Tensors) -> torch.Tensor:
        x, ids, weights = given
        there: torch.Tensor = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        wide: torch.Tensor = x.float()
        return wide * there

    return Trial(f"dispatch and combine, {plan}", inputs, run, exact)


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    for name, part in moe_exactness.PARTS.items():
        drawn = moe_exactness.cases(asked.cases, 1, dist.get_world_size(), (torch.bfloat16,))
        yield Check(f"exact: {name}", partial(map, partial(moe_exactness.outcome, part, "cuda"), drawn))
    halves = [layer_trial(plan, skewed) for plan in ("sequential", "push") for skewed in (False, True)]
    wholes = [chain_trial()] + ([held_trial()] if EXPERTS % dist.get_world_size() == 0 else [])
    late, sent = int(asked.late * CYCLES), [sent_trial(plan) for plan in ("sequential", "push")]
    for trial in (*halves, *wholes, *sent):
        yield Check(f"calls: {trial.name}", partial(long_run, trial, asked.calls, False, late), asked.calls)
    gathering = halves if sharers() == 1 else []  # weights of the router, by the library
    for trial in (*gathering, *wholes, sent[1]):
        replays = partial(long_run, trial, asked.replays, True, late)
        yield Check(f"replayed: {trial.name}", replays, asked.replays)
    # Not of halves: they gather the router's weights by the library, whose group is unusable once a call has timed out.
    for trial in (*wholes, sent[1]):
        yield Check(f"absent: {trial.name}", partial(absent_rank, trial, asked.deadline + LATE_S + 3), 1)


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=DEADLINE_S)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--late", type=float, default=0.1, help="seconds")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()

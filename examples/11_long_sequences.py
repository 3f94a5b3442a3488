"""Causal attention over a sequence that four ranks share, by every plan, forward and backward, beside torch's of all.

    python examples/11_long_sequences.py

Ranks have zigzag rows, so that each has as much of the causal work as the others. Gradients are checked, those of keys
and values too, of which every rank computes parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

import overweave as ow
from overweave.attention import zigzag_order
from overweave.runtime.host.processes import run_ranks

RANKS, TOKENS, HEADS, GROUPS, COLUMNS = 4, 64, 8, 4, 16
PLANS = ("sequential", "per_shard", "ring", "heads")


def step() -> list[list[float]]:
    """By plan, how far this rank's rows of the result, and of all gradients, are off torch's of the whole sequence."""
    same, rank, off = torch.Generator().manual_seed(0), dist.get_rank(), []
    whole = [torch.randn(1, heads, TOKENS, COLUMNS, generator=same) for heads in (HEADS, GROUPS, GROUPS)]
    for each in whole:
        each.requires_grad_()
    wanted = functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wanted.square().sum().backward()
    rows = zigzag_order(TOKENS, RANKS).chunk(RANKS)[rank]
    for plan in PLANS:
        own = [each.detach()[:, :, rows].requires_grad_() for each in whole]
        out = ow.context_parallel_attention(*own, is_causal=True, enable_gqa=True, sequence="zigzag", plan=plan)
        out.square().sum().backward()
        pairs = [(out, wanted), *((mine.grad, all_of.grad) for mine, all_of in zip(own, whole, strict=True))]
        off.append([float((mine - all_of[:, :, rows]).detach().abs().max()) for mine, all_of in pairs])
    return off


def main() -> None:
    for plan, *told in zip(PLANS, *run_ranks(step, RANKS), strict=True):
        out, *gradients = (max(each) for each in zip(*told, strict=True))
        print(f"{plan}: off torch by {out:.0e}, gradients by {max(gradients):.0e}, on {RANKS} ranks")


if __name__ == "__main__":
    main()

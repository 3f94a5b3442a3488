"""Has a row the same bits in every batch on GPUs, under `ow.settings(batch_invariant=True)`, and what is the price?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_batches [--only all_reduce]
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_batches --times

bits: each operator at the sizes of a layer of Llama-3-8B, normal numbers in bf16: the first rows of every batch have
the bits that they have in the largest, by the default choice and by every plan that the setting allows. --times: the
call with the setting over the same call without it, each as a CUDA graph, by turns; the median of the slowest rank.
Ranks that share a GPU have gloo as their library, and their times say nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import Check, arguments, join, leave, report
from campaigns.rates.gpu_sent import as_graph, measured
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.ops.dispatch.call import call
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.space.target import target_of

BATCHES = (1, 2, 7, 64, 100, 512)
N, K = 4096, 2048


def problem_of(operator: str, tokens: int) -> Problem:
    ranks = dist.get_world_size()
    return Problem(operator=operator, m=tokens, n=N, k=K, world_size=ranks, dtype="bfloat16", batch_invariant=True)


def allowed_plans(operator: str) -> list[str]:
    """The methods that run under the setting, as they are."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    asked = MethodRequest(problem_of(operator, max(BATCHES)), {}, target)
    return [method.name for method in methods_for(operator) if not obstacle(asked, method, "device")]


def given(operator: Operator, tokens: int) -> dict[str, Any]:
    """This rank's tensors of so many tokens, of which a larger batch has the same ones first. Of an exchange, tokens
    are the rows of each block.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts_rows = operator.gathers and not operator.exchanges
    of_x, of_w = (torch.Generator("cuda").manual_seed(seed) for seed in (1 if parts_rows else 2 + rank, 100 + rank))
    x = torch.randn(ranks, max(BATCHES), K, generator=of_x, device="cuda").bfloat16()[:, :tokens]
    w = torch.randn(N, K, generator=of_w, device="cuda").bfloat16().t()
    if operator.exchanges:
        return {"x": x.reshape(-1, K).contiguous(), "w": w}
    if parts_rows:
        return {"x": x[0, slice(*shard_rows(tokens, ranks, rank))].contiguous(), "w": w, "m": tokens}
    return {"x": x[0].contiguous(), "w": w} | ({"m": tokens} if operator.has_row_shards else {})


def rows_of(operator: Operator, tokens: int, plan: str | None) -> torch.Tensor:
    """`[blocks, tokens, n]` of all ranks' rows where a call gives a rank its share alone."""
    y: torch.Tensor = call(operator, None, given(operator, tokens) | {"plan": plan})["y"]
    if operator.exchanges:
        return y.view(dist.get_world_size(), tokens, N)
    if operator.scatters:
        whole = y.new_zeros(tokens, N)  # each row comes from one rank, and zeros from the others
        whole[slice(*shard_rows(tokens, dist.get_world_size(), dist.get_rank()))] = y
        dist.all_reduce(whole)
        return whole[None]
    return y[None]


def differing(operator: Operator, plan: str | None) -> Iterator[str]:
    """The batches whose rows have other bits than in the largest batch by the default choice."""
    with ow.settings(batch_invariant=True):
        whole = rows_of(operator, max(BATCHES), None)
        for tokens in BATCHES:
            is_same = torch.equal(rows_of(operator, tokens, plan), whole[:, :tokens])
            yield "" if is_same else f"{tokens} tokens"


def checks() -> Iterator[Check]:
    for name, operator in OPERATORS.items():
        for plan in (None, *allowed_plans(name)):
            yield Check(f"bits: {name}.{plan}", partial(differing, operator, plan))


def times(only: str) -> Iterator[str]:
    """Of each operator and batch, the microseconds without the setting and with it."""
    for name, operator in OPERATORS.items():
        for tokens in BATCHES if only in name else ():
            calls = {}
            for is_on in (False, True):
                with ow.settings(batch_invariant=is_on):
                    calls[str(is_on)] = as_graph(partial(call, operator, None, given(operator, tokens)))
            off, on = measured(calls).values()
            yield f"{name:24s} {tokens:4d} tokens: {off:8.1f} us without, {on:8.1f} us with: {on / off:5.2f}"


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=20)
    parser.add_argument("--times", action="store_true")
    asked: argparse.Namespace = parser.parse_args()
    join(timedelta(seconds=asked.deadline))
    if not asked.times:
        report.run(check for check in checks() if asked.only in check.name)
        report.finish()
    for line in times(asked.only):
        if dist.get_rank() == 0:
            print(line, flush=True)
    leave()


if __name__ == "__main__":
    main()

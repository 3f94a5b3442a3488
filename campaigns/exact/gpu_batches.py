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
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.exact.calls import device, generator
from campaigns.gpu_ranks import Check, arguments, join, leave, report
from campaigns.rates.gpu_sent import as_graph, measured
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.space.target import target_of


class Calls(NamedTuple):
    """Calls of an operator whose rows are compared over batches, by the default choice and by `plans`.

    Parts of sums in bf16 are rounded, so that who adds which of them shows; in fp32 torch's matmul on a CPU has another
    order over k for other numbers of rows.
    """

    operator: str
    plans: tuple[str, ...] = ()
    n: int = 4096
    k: int = 2048
    batches: tuple[int, ...] = (1, 2, 7, 64, 100, 512)
    norm: bool = False
    activation: str | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def record(self) -> Operator:
        return OPERATORS[self.operator]


def allowed_plans(calls: Calls) -> tuple[str, ...]:
    """The methods that run under the setting, as they are."""
    m, ranks = max(calls.batches), dist.get_world_size()
    problem = Problem(
        operator=calls.operator, m=m, n=calls.n, k=calls.k, world_size=ranks, dtype="bfloat16", batch_invariant=True
    )
    request = MethodRequest(problem, {}, target_of(torch.device("cuda", torch.cuda.current_device())))
    return tuple(method.name for method in methods_for(calls.operator) if not obstacle(request, method, "device"))


def given(calls: Calls, tokens: int) -> dict[str, Any]:
    """This rank's tensors of so many tokens, of which a larger batch has the same ones first. Of an exchange, tokens
    are the rows of each block.
    """
    rank, ranks, record, where = dist.get_rank(), dist.get_world_size(), calls.record, device()
    is_gather = record.gathers and not record.exchanges
    of_x, of_w = (generator(seed) for seed in (1 if is_gather else 2 + rank, 100 + rank))
    x = torch.randn(ranks, max(calls.batches), calls.k, generator=of_x, device=where).to(calls.dtype)[:, :tokens]
    w = torch.randn(calls.n, calls.k, generator=of_w, device=where).to(calls.dtype).t()
    if record.exchanges:
        return {"x": x.reshape(-1, calls.k).contiguous(), "w": w}
    rows = slice(*shard_rows(tokens, ranks, rank)) if is_gather else slice(None)
    found: dict[str, Any] = {"x": x[0, rows].contiguous(), "w": w} | ({"m": tokens} if is_gather else {})
    if calls.norm:
        found["norm"] = ow.RmsNorm(torch.ones(calls.n, dtype=calls.dtype, device=where))
    return found | ({"activation": calls.activation} if calls.activation else {})


def rows_of(calls: Calls, tokens: int, plan: str | None) -> torch.Tensor:
    """`[blocks, tokens, n]` of all ranks' rows where a call gives a rank its share alone."""
    y = called(calls, given(calls, tokens) | {"plan": plan})
    y = torch.cat(y, dim=1) if isinstance(y, tuple) else y
    if calls.record.exchanges:
        return y.view(dist.get_world_size(), tokens, calls.n)
    if calls.record.scatters:
        whole = y.new_zeros(tokens, y.shape[1])  # each row comes from one rank, and zeros from the others
        whole[slice(*shard_rows(tokens, dist.get_world_size(), dist.get_rank()))] = y
        dist.all_reduce(whole)
        return whole[None]
    return y[None]


def called(calls: Calls, tensors: dict[str, Any]) -> Any:
    x, w, *_ = tensors.values()
    return getattr(ow, calls.operator)(x, w, **{name: each for name, each in tensors.items() if name not in ("x", "w")})


def differing(calls: Calls) -> list[str]:
    """The plans and batches in which a row has other bits than in the largest batch, by the default choice."""
    found = []
    with ow.settings(batch_invariant=True):
        whole = rows_of(calls, max(calls.batches), None)
        for plan, tokens in product((None, *calls.plans), calls.batches):
            if not torch.equal(rows_of(calls, tokens, plan), whole[:, :tokens]):
                found.append(f"{plan} of {tokens}")
    return found


def checks() -> Iterator[Check]:
    for name in OPERATORS:
        for plan in ((), *((each,) for each in allowed_plans(Calls(name)))):
            calls = Calls(name, plan)
            yield Check(f"bits: {name}.{' '.join(plan) or None}", partial(differing, calls), len(calls.batches))


def times(only: str) -> Iterator[str]:
    """Of each operator and batch, the microseconds without the setting and with it."""
    for calls in (Calls(name) for name in OPERATORS if only in name):
        for tokens in calls.batches:
            graphs = {}
            for is_on in (False, True):
                with ow.settings(batch_invariant=is_on):
                    graphs[str(is_on)] = as_graph(partial(called, calls, given(calls, tokens)))
            off, on = measured(graphs).values()
            yield f"{calls.operator:24s} {tokens:4d} tokens: {off:8.1f} us without, {on:8.1f} us with: {on / off:5.2f}"


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

"""How long does attention take that GPUs split? `python -m campaigns.gpu_attention --times`, and `--alone`.

--times: causal, bf16, heads of Attn-1, Attn-2 and Llama-3-70B, zigzag rows: each plan, NCCL's gather with torch's
attention, and torch's `context_parallel` by both its rotations. `ideal` is torch's quickest
attention of the whole sequence on one GPU, over W. Methods are interleaved; the median of the slowest rank, in us,
forward and forward with backward, and what of a GPU each reaches: ideal / time.

--alone: one GPU computes what each of W ranks would, keys and values there from the start, rank by rank, and what that
takes over torch's attention of the whole: the price of pieces and of their merge.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overweave.attention import context_parallel_attention, zigzag_order
from overweave.attention.library_ways import attend, by_context_parallel, by_gather
from overweave.attention.sequence import Sequence
from overweave.attention.work import AttendWork, Call, GradientWork, as_rows
from overweave.memory.group import resolve
from overweave.schedules.records.attention import PLANS

TOKENS, DEADLINE, ROUNDS, COLUMNS = (4096, 8192, 16384, 32768), timedelta(seconds=30), 7, 128
HEADS = {"Attn-1": (32, 32), "Attn-2": (64, 64), "Llama-3-70B": (64, 8)}
Method = Callable[[], object]


class Given(NamedTuple):
    """q, k, v and the gradient of the result, whole or of a rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def rows(self, rows: torch.Tensor) -> Given:
        return Given(*(each[:, :, rows].contiguous() for each in self))

    def run(self, attention: Callable[..., torch.Tensor], is_backward: bool) -> Method:
        """An attention of q, k and v, and with its gradients."""
        leaves = [each.detach().requires_grad_(is_backward) for each in self[:3]]

        def forward() -> object:
            return attention(*leaves)

        def both() -> object:
            return torch.autograd.grad(attention(*leaves), leaves, self.dout)

        return both if is_backward else forward


def drawn(heads: tuple[int, int], tokens: int) -> Given:
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, each, tokens, COLUMNS) for each in (heads[0], heads[1], heads[1], heads[0])]
    return Given(*(torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for shape in shapes))


def median_us(methods: dict[str, Method], is_alone: bool) -> dict[str, float]:
    """Of the slowest rank. Methods take turns."""
    for call in methods.values():
        call()
        call()
    found: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, call in methods.items():
            if not is_alone:
                dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3)
    medians = torch.tensor([sorted(each)[ROUNDS // 2] for each in found.values()], device="cuda")
    if not is_alone:
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(found, medians.tolist(), strict=True))


def methods_of(whole: Given, is_backward: bool) -> Iterator[tuple[str, Method]]:
    group = resolve(None)
    ranks, tokens = group.world_size, whole.q.shape[2]
    sequence = Sequence(tokens, ranks, is_causal=True, is_zigzag=True)
    yield "whole", whole.run(partial(attend, is_causal=True), is_backward)
    own = whole.rows(zigzag_order(tokens, ranks, whole.q.device).chunk(ranks)[group.rank])
    yield "nccl", own.run(by_gather(sequence, group), is_backward)
    for plan in PLANS:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "sequence": "zigzag", "plan": plan}
        yield plan, own.run(partial(context_parallel_attention, **options), is_backward)
    for rotation in ("allgather", "alltoall"):
        yield f"torch {rotation}", own.run(by_context_parallel(sequence, group, rotation), is_backward)


def print_beside(asked: argparse.Namespace, join: Callable[[], object], leave: Callable[[], None]) -> None:
    """The table of --times."""
    join()
    ranks = dist.get_world_size()
    for name, heads in HEADS.items():
        for tokens in asked.tokens if asked.only in name else ():
            for is_backward in (False, True):
                found = median_us(dict(methods_of(drawn(heads, tokens), is_backward)), is_alone=False)
                ideal = found.pop("whole") / ranks
                line = " | ".join(f"{each} {us:8.0f} {ideal / us:.3f}" for each, us in found.items())
                if dist.get_rank() == 0:
                    what = "both   " if is_backward else "forward"
                    print(f"{name:12s} {tokens:6d} {what} ideal {ideal:8.0f} | {line}", flush=True)
                torch.cuda.empty_cache()
    leave()


def all_pieces(whole: Given, sequence: Sequence, is_backward: bool) -> Method:
    """What every rank computes, rank by rank, with all keys and values there from the start."""
    ranks, device = sequence.ranks, whole.q.device
    order = zigzag_order(sequence.rows, ranks, device) if sequence.is_zigzag else torch.arange(sequence.rows).to(device)
    shards = [whole.rows(rows) for rows in order.chunk(ranks)]
    rows = [tuple(as_rows(each).contiguous() for each in (given.k, given.v)) for given in shards]
    room = [tuple(each.new_zeros(each.shape, dtype=torch.float32) for each in of_shard) for of_shard in rows]
    calls = [
        Call(each.q, each.k, each.v, None, sequence, "per_shard", COLUMNS**-0.5, {"place": [rank, ranks]})
        for rank, each in enumerate(shards)
    ]

    def method() -> None:
        for call, given in zip(calls, shards, strict=True):
            result = torch.empty_like(given.q), given.q.new_empty(given.q.shape[:3], dtype=torch.float32)
            works: list[Any] = [AttendWork(call, result)]
            if is_backward:
                works.append(GradientWork(call, (given.dout, *result), tuple(map(torch.empty_like, given[:3]))))
            for work in works:
                for step in range(ranks):
                    source = (call.rank - step) % ranks
                    work.piece(source, rows[source] if step else ())
                    work.add(room[source], ())
                work.finish([(slice(0, sequence.own(call.rank)), room[call.rank])])

    return method


def print_alone(asked: argparse.Namespace) -> None:
    """The table of --alone."""
    for name, heads in HEADS.items():
        for tokens in asked.tokens if asked.only in name else ():
            whole = drawn(heads, tokens)
            for is_causal in (True, False):
                sequence = Sequence(tokens, asked.ranks, is_causal, is_zigzag=is_causal)
                for is_backward in (False, True):
                    methods = {
                        "whole": whole.run(partial(attend, is_causal=is_causal), is_backward),
                        "pieces": all_pieces(whole, sequence, is_backward),
                    }
                    found = median_us(methods, is_alone=True)
                    what = f"{'causal' if is_causal else 'all   '} {'both   ' if is_backward else 'forward'}"
                    ratio = found["pieces"] / found["whole"]
                    told = f"whole {found['whole']:8.0f} us, of {asked.ranks} ranks {found['pieces']:8.0f} {ratio:.3f}"
                    print(f"{name:12s} {tokens:6d} {what} {told}", flush=True)

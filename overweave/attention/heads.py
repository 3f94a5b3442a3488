"""Heads for rows: an all-to-all of the library, after which a rank has some heads of the whole sequence, and back.

heads_of_all_rows   [b, h, s/W, d] -> [b, h/W, s, d]     its gradient goes back
rows_of_all_heads   [b, h/W, s, d] -> [b, h, s/W, d]     its gradient is gathered

SOURCE: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.ops.call.collective import run_collective
from overweave.ops.dispatch.collectives import WHERE, Exchange, agreed
from overweave.ops.dispatch.torch_ops import TorchOp, define


def heads_of_all_rows(exchange: Exchange, x: torch.Tensor, rows: int) -> torch.Tensor:
    """This rank's heads of the rows of all ranks, as these are stored. rows: of all ranks."""
    heads: torch.Tensor = torch.ops.overweave.exchange_heads(x, rows=rows, is_back=False, **exchange.options)
    return heads


def rows_of_all_heads(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    """The opposite."""
    rows: torch.Tensor = torch.ops.overweave.exchange_heads(x, rows=x.shape[2], is_back=True, **exchange.options)
    return rows


def _exchange(
    x: torch.Tensor, *, rows: int, is_back: bool, group_name: str, told: str, place: list[int]
) -> torch.Tensor:
    (rank, ranks), (b, h, _, d) = place, x.shape
    spans = [shard_rows(rows, ranks, each) for each in range(ranks)]
    by_rank = [high - low for low, high in spans]
    own = by_rank[rank]
    if is_back:
        sent, to, source = x.permute(2, 0, 1, 3), by_rank, [own] * ranks
        landed = x.new_empty((ranks * own, b, h, d))
    else:
        sent = x.unflatten(1, (ranks, h // ranks)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        to, source = [own] * ranks, by_rank
        landed = x.new_empty((rows, b, h // ranks, d))

    def move(group: Group) -> torch.Tensor:
        if rows:
            run_collective(group, dist.all_to_all_single, landed, sent.contiguous(), source, to)
        return landed

    agreed(group_name, f"{told}: heads{' back' * is_back}", move)
    if is_back:
        return landed.view(ranks, own, b, h, d).permute(2, 0, 3, 1, 4).reshape(b, ranks * h, own, d)
    return landed.permute(1, 2, 0, 3).contiguous()


def _exchange_fake(
    x: torch.Tensor, *, rows: int, is_back: bool, group_name: str, told: str, place: list[int]
) -> torch.Tensor:
    (rank, ranks), (b, h, _, d) = place, x.shape
    if not is_back:
        return x.new_empty((b, h // ranks, rows, d))
    low, high = (0, rows // ranks) if rows % ranks == 0 else shard_rows(rows, ranks, rank)
    return x.new_empty((b, h * ranks, high - low, d))


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    told = str(keyword_only_inputs["told"]).removeprefix("gradients of ")
    is_back = not keyword_only_inputs["is_back"]
    ctx.options = dict(keyword_only_inputs) | {"told": f"gradients of {told}", "is_back": is_back}


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    exchanged: torch.Tensor = torch.ops.overweave.exchange_heads(gradient.contiguous(), **ctx.options)
    return exchanged


_EXCHANGE = f"(Tensor x, *, SymInt rows, bool is_back, {WHERE}) -> Tensor"
define(TorchOp("exchange_heads", _EXCHANGE, _exchange, _exchange_fake, _backward, _keep, is_twice_differentiable=True))

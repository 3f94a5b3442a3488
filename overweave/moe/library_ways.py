"""A layer of experts as the library has it: collectives, index operations and torch's grouped matmul."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from overweave.compat.torch_names import all_gather_single, grouped_mm, reduce_scatter_single
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.moe.overlapped import ExpertWeights
from overweave.runtime.library.library import as_movable


class LayerInput(NamedTuple):
    """This rank's tokens `[t/W, hidden]`, and the experts and weights of each, `[t/W, top]`."""

    x: torch.Tensor
    ids: torch.Tensor
    topk_weights: torch.Tensor


def gathered(given: LayerInput, group: Group) -> LayerInput:
    """Return all ranks' tokens, with their experts and weights."""
    whole = LayerInput(*(each.new_empty((each.shape[0] * group.world_size, each.shape[1])) for each in given))
    for all_rows, own_rows in zip(whole, given, strict=True):
        all_gather_single(all_rows, own_rows, group=group.process_group)
    return whole


def link_alone(given: LayerInput, group: Group) -> torch.Tensor:
    """Send tokens to every rank and back, and compute nothing."""
    whole, y = given.x.new_empty((given.x.shape[0] * group.world_size, given.x.shape[1])), torch.empty_like(given.x)
    all_gather_single(whole, given.x, group=group.process_group)
    reduce_scatter_single(y, whole, group=group.process_group)
    return y


def gathered_and_scattered(given: LayerInput, weights: ExpertWeights, group: Group) -> torch.Tensor:
    """Every rank gets all tokens, adds what its part of the experts makes of them, and sums are scattered. No host
    looks at a count, so that a CUDA graph holds it."""
    whole = gathered(given, group)
    ids = weights.own_ids(whole.ids)
    products = _products(whole.x, ids, weights).view(*ids.shape, -1) * whole.topk_weights.unsqueeze(2).to(given.x.dtype)
    if weights.first is not None:  # experts of other ranks made nothing
        products = torch.where((ids >= 0).unsqueeze(2), products, 0.0)
    y = torch.empty_like(given.x)
    reduce_scatter_single(y, products.sum(1), group=group.process_group)
    return y


def sent_and_returned(given: LayerInput, weights: ExpertWeights, experts: int, group: Group) -> torch.Tensor:
    """Each pair of a token and an expert travels to the rank that holds the expert, and its product comes back. Every
    host reads the counts."""
    ranks, (tokens, top) = group.world_size, given.ids.shape
    sorted_ids, order = given.ids.flatten().sort(stable=True)
    begins = [shard_rows(experts, ranks, rank)[0] for rank in range(1, ranks)]
    bounds = torch.tensor(begins, device=sorted_ids.device, dtype=sorted_ids.dtype)
    to = torch.bincount(torch.bucketize(sorted_ids, bounds, right=True), minlength=ranks)
    come = torch.empty_like(to)
    dist.all_to_all_single(come, to, group=group.process_group)
    splits = come.tolist(), to.tolist()

    def sent(rows: torch.Tensor, split: tuple[list[int], list[int]]) -> torch.Tensor:
        received = rows.new_empty((sum(split[0]), *rows.shape[1:]))
        dist.all_to_all_single(as_movable(received), as_movable(rows), *split, group=group.process_group)
        return received

    x, ids = sent(given.x[order // top], splits), sent(sorted_ids, splits)
    returned = sent(_products(x, weights.own_ids(ids).unsqueeze(1), weights), (splits[1], splits[0]))
    products = torch.empty_like(returned)
    products[order] = returned
    of_slots = products.view(tokens, top, -1) * given.topk_weights.unsqueeze(2).to(products.dtype)
    return of_slots.sum(1)


def _products(x: torch.Tensor, ids: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Both matmuls of each row by each of its experts `[rows, top]`, in the order of ids. What has no expert, -1, comes
    last, and holds anything."""
    up, down, experts = weights.up.transpose(1, 2), weights.down.transpose(1, 2), weights.up.shape[0]
    if not experts:
        return x.new_zeros((ids.numel(), x.shape[1]))
    sorted_ids, order = (
        (ids if weights.first is None else torch.where(ids < 0, experts, ids)).flatten().sort(stable=True)
    )
    every = torch.arange(experts, device=ids.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, every, right=True).int()
    gate, first = grouped_mm(x[order // ids.shape[1]], up, offs=ends).chunk(2, 1)
    products = grouped_mm(functional.silu(gate) * first, down, offs=ends)
    back = torch.empty_like(products)
    back[order] = products
    return back

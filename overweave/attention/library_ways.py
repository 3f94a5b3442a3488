"""Attention over a shared sequence as the library has it: collectives of NCCL or gloo around torch's attention, and
torch's own `context_parallel`. What plans are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from overweave.attention.sequence import Sequence, zigzag_order
from overweave.compat.torch_names import all_gather_single, context_parallel, reduce_scatter_single, set_rotate_method
from overweave.memory.group import Group

QUICKEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
AttentionCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _GatheredRows(torch.autograd.Function):
    """`[s, ...]` of each rank -> `[W s, ...]`; its gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        every = own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))
        all_gather_single(every, own.contiguous(), group=group)
        return every

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = gradient.new_empty((gradient.shape[0] // ctx.group.size(), *gradient.shape[1:]))
        reduce_scatter_single(own, gradient.contiguous(), group=ctx.group)
        return own, None


class _Exchanged(torch.autograd.Function):
    """`[W, ...]`, a part for each rank -> `[W, ...]`, a part of each rank; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        landed = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(landed, parts.contiguous(), group=group)
        return landed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        landed = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(landed, gradient.contiguous(), group=ctx.group)
        return landed, None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """torch's quickest attention, of grouped heads too; a causal mask is aligned at the last query and key."""
    groups = q.shape[1] // k.shape[1]
    with sdpa_kernel(QUICKEST, set_priority=True):
        if not is_causal or q.shape[2] == k.shape[2]:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=groups > 1)
        keys, values = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (k, v))
        mask: Any = causal_lower_right(q.shape[2], k.shape[2])
        return functional.scaled_dot_product_attention(q, keys, values, mask)


def by_gather(sequence: Sequence, group: Group) -> AttentionCall:
    """Keys and values of all ranks are gathered; then a rank's rows are attended, each range of them over the keys that
    it sees. Of whole shards, without a window."""
    places = sequence.places(group.rank, slice(0, sequence.own(group.rank)))

    def whole(x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = _GatheredRows.apply(x.permute(2, 0, 1, 3), group.process_group)  # type: ignore[no-untyped-call]
        if sequence.is_zigzag:
            rows = rows.index_select(0, zigzag_order(sequence.rows, sequence.ranks, x.device).argsort())
        return rows.permute(1, 2, 0, 3)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values, results, begin = whole(k), whole(v), [], 0
        for low, high in places:
            end = high if sequence.is_causal else sequence.rows
            queries = q[:, :, begin : begin + high - low]
            results.append(attend(queries, keys[:, :, :end], values[:, :, :end], sequence.is_causal))
            begin += high - low
        return torch.cat(results, 2)

    return run


def by_heads(sequence: Sequence, group: Group) -> AttentionCall:
    """All-to-alls give a rank some heads of all rows, and back: Ulysses. Heads that ranks divide, whole shards."""
    ranks = sequence.ranks

    def exchanged(parts: torch.Tensor) -> torch.Tensor:
        landed: torch.Tensor = _Exchanged.apply(parts, group.process_group)  # type: ignore[no-untyped-call]
        return landed

    def there(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % ranks:
            raise ValueError(f"{ranks} ranks do not divide {x.shape[1]} heads")
        parts = exchanged(x.unflatten(1, (ranks, x.shape[1] // ranks)).movedim(1, 0))  # [W, b, h/W, s/W, d]
        rows = parts.movedim(0, 2).flatten(2, 3)
        return rows.index_select(2, order.argsort()) if (order := _order(x)) is not None else rows

    def back(x: torch.Tensor) -> torch.Tensor:
        rows = x.index_select(2, order) if (order := _order(x)) is not None else x
        parts = exchanged(rows.unflatten(2, (ranks, rows.shape[2] // ranks)).movedim(2, 0))
        return parts.movedim(0, 1).flatten(1, 2)

    def _order(x: torch.Tensor) -> torch.Tensor | None:
        return zigzag_order(sequence.rows, ranks, x.device) if sequence.is_zigzag else None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return back(attend(there(q), there(k), there(v), sequence.is_causal))

    return run


def by_context_parallel(sequence: Sequence, group: Group, rotation: str) -> AttentionCall:
    """torch's own, of zigzag rows, whose context shards a buffer of nobody's: the rows are this rank's from the start.
    rotation: `allgather` or `alltoall`. Raises ValueError for what it has not."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not q.is_cuda:
            raise ValueError("torch's context_parallel has no kernels of a CPU")
        if sequence.is_zigzag != sequence.is_causal:
            raise ValueError("it deals rows of a causal mask as zigzag does, and others one behind the other")
        groups = q.shape[1] // k.shape[1]
        keys, values = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (k, v))
        set_rotate_method(rotation)
        mesh, buffer = DeviceMesh.from_group(group.process_group, "cuda"), q.new_empty(2 * sequence.ranks)
        shared = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})
        with shared, sdpa_kernel(QUICKEST[:2], set_priority=True):
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=sequence.is_causal)

    return run


def link_alone(k: torch.Tensor, v: torch.Tensor, group: Group) -> torch.Tensor:
    """Keys and values of all ranks are gathered, and nothing computed."""
    for x in (k, v):
        every = x.new_empty((x.numel() * group.world_size,))
        all_gather_single(every, x.reshape(-1), group=group.process_group)
    return every

"""What attention over a shared sequence takes: a typed error, with the cure, for everything else, on every rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.attention import library
from overweave.attention.sequence import CONTIGUOUS, ZIGZAG
from overweave.errors import InputError
from overweave.ir.shards import shard_rows
from overweave.ops.call.operands import check_primal
from overweave.ops.dispatch.route import GroupRank
from overweave.schedules.records.attention import HEADS, PLANS, SEQUENTIAL

NAME = "context_parallel_attention"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Asked(NamedTuple):
    """The words of a call. tokens: of all ranks."""

    is_causal: bool
    window: int | None
    sequence: str
    tokens: int | None
    plan: str | None


def check_words(is_causal: object, scale: object) -> None:
    """Raises InputError."""
    if type(is_causal) is not bool:
        raise InputError(f"{NAME}: is_causal", f"got {str(is_causal)[:40]!r}", "Pass True or False")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise InputError(f"{NAME}: scale", f"got {str(scale)[:40]!r}", "Pass a number, or None for 1 / sqrt(d)")


def check_operands(q: object, k: object, v: object, cu_seqlens: object, enable_gqa: bool) -> None:
    """Raises InputError."""
    is_packed = cu_seqlens is not None
    form = "[tokens, heads, d]" if is_packed else "[batch, heads, tokens, d]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4 - is_packed:
            found = f"{name} is {list(x.shape)}" if isinstance(x, torch.Tensor) else f"{name} is a {type(x).__name__}"
            raise InputError(f"{NAME} of {form}", found, "Pass cu_seqlens with packed tokens, and a batch without")
        if x.layout is not torch.strided or x.is_nested:
            found = f"{name} is {'nested' if x.is_nested else x.layout}"
            raise InputError(f"{NAME} of dense tensors", found, "Pass packed tokens with cu_seqlens, or x.to_dense()")
        check_primal(f"{NAME}: {name}", x)
    assert isinstance(q, torch.Tensor)
    assert isinstance(k, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    heads, batch = (1, (0, 2)) if is_packed else (1, (0, 2, 3))
    shapes = f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if k.shape != v.shape or any(q.shape[each] != k.shape[each] for each in batch):
        raise InputError(f"{NAME} of one batch, tokens and d", shapes, "Give q, k and v alike but for heads")
    if not q.shape[-1]:
        raise InputError(f"{NAME} of heads of at least one column", shapes, "Give q, k and v some")
    is_even = k.shape[heads] > 0 and q.shape[heads] % k.shape[heads] == 0
    if q.shape[heads] != k.shape[heads] and not (enable_gqa and is_even):
        raise InputError(f"{NAME} of {q.shape[heads]} heads", shapes, "Pass enable_gqa=True and heads that k's divide")
    _check_kinds(q, k, v)
    if cu_seqlens is not None:
        _check_documents(cu_seqlens, q.device)


def _check_kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    kinds = {(each.dtype, each.device) for each in (q, k, v)}
    if len(kinds) > 1 or q.dtype not in DTYPES:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(f"{NAME} in one dtype, on one device", f"got {found}", "Pass q, k and v in bf16 or fp16")
    columns = q.shape[-1]
    is_known = q.dtype in library.DTYPES and columns <= library.MOST_COLUMNS and columns % library.COLUMNS_STEP == 0
    if q.is_cuda and not is_known:
        found = f"{q.dtype}, d = {columns}: torch has no kernel that says its log-sum-exp"
        cure = f"Pass bf16 or fp16, d a multiple of {library.COLUMNS_STEP} up to {library.MOST_COLUMNS}: pad with zeros"
        raise InputError(f"{NAME} on a GPU", found, f"{cure}, and pass scale")


def _check_documents(cu_seqlens: object, device: torch.device) -> None:
    asked, cure = (
        f"{NAME}: cu_seqlens [documents + 1]",
        "Pass int32 offsets in the tokens of all ranks, alike on every rank",
    )
    if not isinstance(cu_seqlens, torch.Tensor):
        raise InputError(asked, f"got a {type(cu_seqlens).__name__}", cure)
    is_list = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0 and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not is_list or cu_seqlens.device != device:
        found = f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        raise InputError(asked, found, f"{cure}, on {device}")


def all_tokens(place: GroupRank, own: int, asked: Asked) -> int:
    """Of all ranks. Raises InputError where this rank has others than its layout gives it."""
    if asked.sequence not in (CONTIGUOUS, ZIGZAG):
        found = f"got {str(asked.sequence)[:40]!r}"
        raise InputError(f"{NAME}: sequence", found, f"Use one of {CONTIGUOUS}, {ZIGZAG}")
    tokens, ranks = asked.tokens, place.world_size
    if tokens is None:
        tokens = own * ranks
    is_count = isinstance(tokens, int) and tokens >= 0
    low, high = shard_rows(tokens, ranks, place.rank) if is_count else (0, -1)
    if high - low != own:
        found = f"rank {place.rank} of {ranks} passes {own} of tokens={str(asked.tokens)[:40]}"
        raise InputError(f"{NAME}: tokens dealt as torch.chunk deals them", found, "Deal them so, or mend tokens")
    if asked.sequence == ZIGZAG and tokens % (2 * ranks):
        found, cure = (
            f"{tokens} tokens are no 2 x {ranks} pieces",
            f"Pad to a multiple of {2 * ranks}, or use contiguous",
        )
        raise InputError(f"{NAME} of a zigzag sequence", found, cure)
    return tokens


def chosen_plan(heads: tuple[int, int], ranks: int, has_documents: bool, asked: Asked) -> str:
    """The plan that is asked for, or the first that can run. heads: of q and k. Raises InputError."""
    if asked.plan is not None and not (isinstance(asked.plan, str) and asked.plan in PLANS):
        found = "there is no such plan"
        raise InputError(f"{NAME} with plan {str(asked.plan)[:40]!r}", found, f"Use one of {', '.join(PLANS)}")
    window = asked.window
    if window is not None and (type(window) is not int or window < 1 or not asked.is_causal):
        cure = "Pass how many keys a query sees, its own the last, and is_causal=True"
        raise InputError(f"{NAME} with window={str(window)[:40]}", f"is_causal={asked.is_causal}", cure)
    is_mixed = window is not None and (asked.sequence == ZIGZAG or has_documents) and ranks > 1
    reason = "a window over documents, or over zigzag rows, is no window of a piece" if is_mixed else ""
    chosen = asked.plan or (HEADS if is_mixed else SEQUENTIAL)
    if chosen == HEADS and any(each % ranks for each in heads):
        reason = (
            f"{ranks} ranks do not divide {heads[0]} heads of q and {heads[1]} of k{' and ' * bool(reason)}{reason}"
        )
    elif chosen == HEADS:
        reason = ""
    if reason:
        cure = "Use contiguous rows without cu_seqlens" if is_mixed else f"Use another of {', '.join(PLANS)}"
        raise InputError(f"{NAME} with plan {chosen!r}", reason, cure)
    return chosen

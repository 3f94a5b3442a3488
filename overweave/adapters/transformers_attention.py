"""Attention of Transformers' models over a sequence that ranks share.

    from overweave.adapters import transformers_attention
    transformers_attention.register_attention(group, sequence="zigzag")
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="overweave")
    rows = zigzag_order(tokens, W).chunk(W)[rank]
    model(input_ids[:, rows], position_ids=rows[None], use_cache=False)

Every layer's attention is that of all ranks' rows; all else of a model works row by row. Masks are causal or none, and
of windows of layers that slide and documents of `cu_seq_lens_q`; any other is refused, since a rank's rows do not show
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.adapters.packages import names_of
from overweave.adapters.report import site
from overweave.attention import context_parallel_attention
from overweave.attention.sequence import CONTIGUOUS
from overweave.errors import InputError
from overweave.memory.group import GroupLike
from overweave.ops.dispatch.route import refusing

with names_of("transformers"):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME, SITE = "overweave", "attention of Transformers"
# What some models pass that is no part of any kernel of torch that says its log-sum-exp.
REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


class Shared(NamedTuple):
    """How ranks share sequences: as `context_parallel_attention` takes it."""

    group: GroupLike = None
    sequence: str = CONTIGUOUS
    plan: str | None = None


_SHARED = Shared()


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **beside: Any,
) -> tuple[torch.Tensor, None]:
    """A layer's attention. query `[b, h, s/W, d]`, key and value `[b, g, s/W, d]` -> `[b, s/W, h, d]`.

    Raises InputError, on all ranks, for what it cannot compute.
    """
    documents = beside.get("cu_seq_lens_q")
    with refusing(_SHARED.group):
        if reason := _reason_unsupported(query, key, attention_mask, beside):
            cure = "Load the model with another attn_implementation, or train it without"
            raise InputError(f"{type(module).__name__} by overweave", reason, cure)
    if not torch.compiler.is_compiling():
        site(SITE).by_overweave += 1
    is_causal = beside.get("is_causal")
    if documents is not None:
        query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    out: torch.Tensor = context_parallel_attention(
        query,
        key,
        value,
        _SHARED.group,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scale=beside.get("scaling"),
        enable_gqa=True,
        window=beside.get("sliding_window"),
        cu_seqlens=documents,
        sequence=_SHARED.sequence,
        plan=_SHARED.plan,
    )
    return (out.transpose(1, 2) if documents is None else out.unsqueeze(0)).contiguous(), None


def _reason_unsupported(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, beside: dict[str, Any]
) -> str:
    """Why a layer's attention is not that of `context_parallel_attention`; empty if it is."""
    if attention_mask is not None:
        return "a mask is passed, whose columns are no other rank's keys"
    if key.shape[2] != query.shape[2]:
        return f"{query.shape[2]} queries meet {key.shape[2]} keys of a cache"
    if beside.get("dropout"):
        return f"dropout={beside['dropout']}, which ranks would draw apart"
    return next((f"{name} is passed" for name in REFUSED if beside.get(name) is not None), "")


def no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """Layers need none. Raises InputError, on all ranks, for padding."""
    with refusing(_SHARED.group):
        if attention_mask is not None and not bool(attention_mask.all()):
            found, cure = "some tokens are padding", "Pack documents, and pass cu_seq_lens_q; or pass no attention_mask"
            raise InputError("mask attention over a sequence that ranks share", found, cure)


def register_attention(group: GroupLike = None, *, sequence: str = CONTIGUOUS, plan: str | None = None) -> None:
    """Make `attn_implementation="overweave"` known: attention over sequences that a group's ranks share.

    sequence, plan: as of `overweave.context_parallel_attention`. A later call replaces them for all models.
    """
    global _SHARED
    _SHARED = Shared(group, sequence, plan)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)

"""Context-parallel attention of Transformers' models: ranks share each sequence.

    from overweave.adapters import transformers_attention
    transformers_attention.register_attention(group, sequence="zigzag")
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="overweave")
    rows = zigzag_order(tokens, W).chunk(W)[rank]
    model(input_ids[:, rows], position_ids=rows[None], use_cache=False)

Every layer attends to the rows of all ranks; everything else in a model works row by row. Attention is causal or full,
with sliding windows and packed documents (`cu_seq_lens_q`); a mask tensor is refused, since it has no columns for the
keys of other ranks.
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
# Arguments of some models that no torch kernel supports which also returns the log-sum-exp.
REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


class SequenceSharing(NamedTuple):
    """How ranks share sequences: arguments of `context_parallel_attention`."""

    group: GroupLike = None
    sequence: str = CONTIGUOUS
    plan: str | None = None


_SHARING = SequenceSharing()


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention: query `[b, h, s/W, d]`, key and value `[b, g, s/W, d]` -> `[b, s/W, h, d]`.

    Raises InputError, on all ranks, for a mask, a KV cache, dropout and the arguments REFUSED. Collective.
    """
    documents = options.get("cu_seq_lens_q")
    with refusing(_SHARING.group):
        if reason := _obstacle(query, key, attention_mask, options):
            cure = "Load the model with another attn_implementation, or train it without"
            raise InputError(f"{type(module).__name__} by overweave", reason, cure)
    if not torch.compiler.is_compiling():
        site(SITE).by_overweave += 1
    is_causal = options.get("is_causal")
    if documents is not None:
        query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    out: torch.Tensor = context_parallel_attention(
        query,
        key,
        value,
        _SHARING.group,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scale=options.get("scaling"),
        enable_gqa=True,
        window=options.get("sliding_window"),
        cu_seqlens=documents,
        sequence=_SHARING.sequence,
        plan=_SHARING.plan,
    )
    return (out.transpose(1, 2) if documents is None else out.unsqueeze(0)).contiguous(), None


def _obstacle(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> str:
    """Return why `context_parallel_attention` cannot compute a layer's attention; empty if it can."""
    if attention_mask is not None:
        return "a mask is passed, without columns for the keys of other ranks"
    if key.shape[2] != query.shape[2]:
        return f"{query.shape[2]} queries meet {key.shape[2]} keys of a cache"
    if options.get("dropout"):
        return f"dropout={options['dropout']}, for which ranks would draw different masks"
    return next((f"{name} is passed" for name in REFUSED if options.get(name) is not None), "")


def no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """Return no mask, since attention is given flags instead. Raises InputError, on all ranks, for padded tokens."""
    with refusing(_SHARING.group):
        if attention_mask is not None and not bool(attention_mask.all()):
            found, cure = "some tokens are padding", "Pack documents, and pass cu_seq_lens_q; or pass no attention_mask"
            raise InputError("mask attention over a sequence that ranks share", found, cure)


def register_attention(group: GroupLike = None, *, sequence: str = CONTIGUOUS, plan: str | None = None) -> None:
    """Register `attn_implementation="overweave"`: attention over sequences that the ranks of a group share.

    sequence, plan: as of `overweave.context_parallel_attention`. A later call replaces all three for all models.
    """
    global _SHARING
    _SHARING = SequenceSharing(group, sequence, plan)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)

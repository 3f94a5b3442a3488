"""Attention by torch's kernels on a GPU, with log-sum-exp out, and its gradients: cuDNN where it can, else flash.

Flash takes windows and documents, too, both aligned at the last query and the last key. Where a query sees no key it
says that its log-sum-exp is plus infinity, and so its gradients take it.
"""

from __future__ import annotations

import torch

from overweave.attention.plain import Seen, Three
from overweave.compat.torch_names import (
    flash_attention_backward,
    flash_attention_forward,
    scaled_dot_product_cudnn_attention,
    scaled_dot_product_cudnn_attention_backward,
)

DTYPES, MOST_COLUMNS, COLUMNS_STEP = (torch.bfloat16, torch.float16), 256, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain.attend`; the result in the dtype of q, the log-sum-exp in fp32."""
    if _is_for_cudnn(q, k, v, seen):
        by_cudnn = scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, seen.is_causal, False, scale=seen.scale)
        return by_cudnn[0], by_cudnn[1].view(q.shape[:3])
    rows = [_rows_first(each, seen) for each in (q, k, v)]
    out, lse = flash_attention_forward(*rows, *_spans(q, k, seen), 0.0, seen.is_causal, False, **_options(seen))[:2]
    if seen.offsets is None:
        return out.transpose(1, 2), lse
    return out.transpose(0, 1).unsqueeze(0), torch.where(lse == torch.inf, -torch.inf, lse).unsqueeze(0)


def gradients(of: Three, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> Three:
    """As `plain.gradients`; in the dtype of q."""
    dout, out, lse = of
    lse, words = lse.contiguous(), torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, which there is not
    if _is_for_cudnn(q, k, v, seen):
        beside = (words[0], words[1], None, None, None, q.shape[2], k.shape[2], 0.0, seen.is_causal)
        found = scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), *beside, scale=seen.scale
        )
        return found[0], found[1], found[2]
    if seen.offsets is not None:
        lse = torch.where(lse == -torch.inf, torch.inf, lse)[0]
    rows = [_rows_first(each, seen) for each in (dout, q, k, v, out)]
    state = (words.view(torch.uint64), words[:0])
    found = flash_attention_backward(*rows, lse, *_spans(q, k, seen), 0.0, seen.is_causal, *state, **_options(seen))
    dq, dk, dv = (each.transpose(1, 2) if each.dim() == 4 else each.transpose(0, 1).unsqueeze(0) for each in found)
    return dq, dk, dv


def _is_for_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> bool:
    if seen.left is not None or seen.offsets is not None:
        return False
    is_grouped = q.shape[1] != k.shape[1]
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, seen.is_causal, is_grouped)
    return torch.backends.cuda.can_use_cudnn_attention(asked)


def _rows_first(x: torch.Tensor, seen: Seen) -> torch.Tensor:
    """`[b, s, h, d]`, or, of documents, `[s, h, d]`."""
    return x.transpose(1, 2) if seen.offsets is None else x[0].transpose(0, 1)


def _spans(q: torch.Tensor, k: torch.Tensor, seen: Seen) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """Of documents, and the longest that there can be."""
    offsets = (None, None) if seen.offsets is None else covering(seen.offsets, (q.shape[2], k.shape[2]))
    return *offsets, q.shape[2], k.shape[2]


def covering(offsets: tuple[torch.Tensor, torch.Tensor], rows: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the same documents, and of queries and of keys in front of and behind them, alone: kernels leave rows
    of no document as they find them."""
    (of_queries, of_keys), (queries, keys) = offsets, (offsets[0].new_full((1,), each) for each in rows)
    zero = torch.zeros_like(queries)
    return (
        torch.cat([zero, of_queries[:1], of_queries, of_queries[-1:], queries]),
        torch.cat([zero, zero, of_keys, keys, keys]),
    )


def _options(seen: Seen) -> dict[str, float | int | None]:
    right = 0 if seen.is_causal else None
    return {
        "scale": seen.scale,
        "window_size_left": seen.left,
        "window_size_right": right if seen.left is not None else None,
    }

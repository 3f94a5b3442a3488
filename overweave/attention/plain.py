"""Attention in plain torch, with log-sum-exp out, and its gradients: what CPU ranks compute, and the reference.

Inputs of 16 bits are computed in fp32, those of fp32 and fp64 in fp64, and nothing is rounded in between.
MEASURED: gradients of `heads` on four ranks, of fp32 computed in fp32, had 1.08 to 1.10 of the error of torch's own
attention; computed in fp64, all plans have 0.15 to 0.28 of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Seen(NamedTuple):
    """What queries see of keys. is_causal, left: as of a `Piece`, in each document. offsets: where documents begin
    among the queries and among the keys, and where the last ends, int32 `[documents + 1]` each; queries see keys of
    their own document, rows of no document nothing. None: all are one."""

    scale: float
    is_causal: bool = False
    left: int | None = None
    offsets: tuple[torch.Tensor, torch.Tensor] | None = None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[b, h, s, d]`, k and v `[b, g, t, d]`, g a divisor of h -> `[b, h, s, d]`, and the log-sum-exp `[b, h, s]`,
    in fp64: pieces are weighed by it. A query that sees no key has zeros, and minus infinity.
    """
    of_groups, keys, values = (_in_groups(each, k) for each in (q, k, v))
    scores = _scores(of_groups, keys, seen)
    most = scores.amax(-1)
    shares = _shares(scores, most)  # of a sum that is not rounded to a logarithm
    sums = shares.sum(-1)
    out, lse = shares @ values / sums.unsqueeze(-1).clamp(min=1.0), most.double() + sums.double().log()
    return out.view(*q.shape[:3], v.shape[3]), lse.view(q.shape[:3])


def gradients(of: Three, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> Three:
    """The parts of the gradients of q, k and v that come of these keys.

    of: the gradient of the result, the result, and the log-sum-exp, over all keys that the queries see.
    """
    dout, out, lse = of
    of_groups, keys, values = (_in_groups(each, k) for each in (q, k, v))
    dout, out = _in_groups(dout, k), _in_groups(out, k)
    shares = _shares(_scores(of_groups, keys, seen), lse.view(of_groups.shape[:-1])).to(keys.dtype)
    of_shares = dout @ values.mT - (dout * out).sum(-1, keepdim=True)
    of_scores = shares * of_shares * seen.scale
    dq = (of_scores @ keys).view(q.shape)
    return dq, (of_scores.mT @ of_groups).sum(2), (shares.mT @ dout).sum(2)


def _in_groups(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`[b, g, h / g, s, d]`, in the dtype of sums; of keys and values h is g."""
    wide = x.double() if x.dtype in (torch.float32, torch.float64) else x.float()
    grouped: torch.Tensor = wide.unflatten(1, (k.shape[1], x.shape[1] // max(1, k.shape[1])))
    return grouped


def _scores(of_groups: torch.Tensor, keys: torch.Tensor, seen: Seen) -> torch.Tensor:
    scores = of_groups @ keys.mT * seen.scale
    return scores.masked_fill(~is_seen((scores.shape[-2], scores.shape[-1]), seen, scores.device), -torch.inf)


def _shares(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()


def is_seen(shape: tuple[int, int], seen: Seen, device: torch.device) -> torch.Tensor:
    """`[s, t]`. A row's place is told from the end of its document."""
    offsets = seen.offsets or tuple(torch.tensor([0, rows], device=device) for rows in shape)
    (document, to_end), (of_key, key_to_end) = (
        _of_documents(rows, starts) for rows, starts in zip(shape, offsets, strict=True)
    )
    seen_by = (document[:, None] == of_key) & (document[:, None] >= 0)
    before = key_to_end - to_end[:, None]
    if seen.is_causal:
        seen_by &= before >= 0
    return seen_by if seen.left is None else seen_by & (before <= seen.left)


def _of_documents(rows: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each row, -1 for none, and how many rows it is from the end of it."""
    at = torch.arange(rows, device=offsets.device)
    document = torch.searchsorted(offsets.long(), at, right=True) - 1
    last = offsets.shape[0] - 1
    document = torch.where(document == last, -1, document)
    return document, offsets.long()[(document + 1).clamp(max=last)] - 1 - at

"""Attention of a rank's queries, piece by piece of the keys, by whatever computes it where tensors are; and the merge.

Results of pieces are weighed by their log-sum-exps and added in fp32 in the order in which a program names pieces, so
that the bits of a result follow from the program and not from who arrives first.
SOURCE: Ring attention (arXiv 2310.01889); the weights as torch's `context_parallel` has them.
"""

from __future__ import annotations

import torch

from overweave.attention import library, plain
from overweave.attention.plain import Seen


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain.attend`, in the dtype of q on a GPU."""
    return library.attend(q, k, v, seen) if q.is_cuda else plain.attend(q, k, v, seen)


def gradients(
    of: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `plain.gradients`, in the dtype of q on a GPU."""
    return library.gradients(of, q, k, v, seen) if q.is_cuda else plain.gradients(of, q, k, v, seen)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Merged:
    """Results of pieces that have been added: `total` is out `[b, h, s, d]` and lse `[b, h, s]`."""

    def __init__(self) -> None:
        self.total: tuple[torch.Tensor, ...] = ()

    def add(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the result of some queries over keys that are new to them; the first is one of all queries."""
        if not self.total:
            self.total = out, lse
            return
        dtype = wide(out.dtype)
        self.total = tuple(each.to(dtype) for each in self.total)
        total, own = (each[:, :, queries] for each in self.total)
        share = torch.sigmoid(lse - own).nan_to_num_(0.0)  # no number where neither sees a key
        total.lerp_(out.to(dtype), share.unsqueeze(-1))
        own.copy_(torch.logaddexp(own, lse))

"""Attention of a rank's queries, piece by piece of the keys, by whatever computes it where tensors are; and the merge.

Results of pieces are weighed by their log-sum-exps and added in fp32 in the order in which a program names pieces, so
that the bits of a result follow from the program and not from who arrives first.
SOURCE: Ring attention (arXiv 2310.01889); the weights as torch's `context_parallel` has them.
"""

from __future__ import annotations

from types import ModuleType

import torch

from overweave.attention import library, plain
from overweave.runtime.backends import load


def kernels_for(x: torch.Tensor) -> ModuleType:
    """What computes pieces where a tensor is: `attend`, and `gradients`."""
    return library if x.is_cuda else plain


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Result = tuple[torch.Tensor, torch.Tensor]  # out `[b, h, s, d]`, and its log-sum-exp `[b, h, s]`


class Merged:
    """Results of so many pieces, added as they are computed, the last into `into`."""

    def __init__(self, pieces: int, into: Result) -> None:
        self._left, self._into = pieces, into
        self._total: Result | None = None

    def add(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the result of some queries over keys that are new to them; the first is one of all queries."""
        self._left -= 1
        if self._total is None:
            self._total = out, lse
            if not self._left:
                _copy(self._total, self._into)
            return
        target = self._into
        if self._left:
            target = out.new_empty(target[0].shape, dtype=wide(out.dtype)), lse.new_empty(target[1].shape)
        merge(self._total, (out, lse), queries.start, target)
        self._total = target


def merge(total: Result, part: Result, begin: int, into: Result) -> None:
    """Weighs a result and one of its rows from `begin` on by their log-sum-exps, and adds them, wide."""
    if total[0].is_cuda:
        load("gpu merge")(total, part, begin, into)
        return
    out, lse = (each.to(wide(each.dtype), copy=True) for each in total)
    rows, own = (each[:, :, begin : begin + part[1].shape[2]] for each in (out, lse))
    share = torch.sigmoid(part[1] - own).nan_to_num_(0.0).to(out.dtype)  # no number where neither sees a key
    rows.lerp_(part[0].to(out.dtype), share.unsqueeze(-1))
    own.copy_(torch.logaddexp(own, part[1]))
    _copy((out, lse), into)


def _copy(result: Result, into: Result) -> None:
    for each, target in zip(result, into, strict=True):
        target.copy_(each)

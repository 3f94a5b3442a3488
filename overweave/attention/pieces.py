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


class RowSum:
    """So many parts of the rows of a gradient, `[b, h, s, d]`, added as they come, the last into `into`; wide between,
    and rounded once. Of no parts: zeros.
    """

    def __init__(self, parts: int, into: torch.Tensor) -> None:
        self._left, self._into = parts, into
        self._total: torch.Tensor | None = None
        self._is_own = False
        if not parts:
            into.zero_()

    def add(self, rows: slice, part: torch.Tensor) -> None:
        """Adds a part of some rows. The first of all rows is not copied, and must stay as it is until the last."""
        self._left -= 1
        if not self._left:
            add_rows(self._into, rows, part, self._total)
        elif self._total is None and part.shape[2] == self._into.shape[2]:
            self._total = part
        else:
            dtype = wide(part.dtype)
            target = self._total if self._is_own else self._into.new_empty(self._into.shape, dtype=dtype)
            assert target is not None
            add_rows(target, rows, part, self._total)
            self._total, self._is_own = target, True


def add_rows(into: torch.Tensor, rows: slice, part: torch.Tensor, before: torch.Tensor | None) -> None:
    """into = before, or zeros, with part added to its `rows`: `[b, h, s, d]` each, part of these rows alone. Sums are
    of the wider of both dtypes, and rounded once. into may be before.
    """
    for rest in (slice(0, rows.start), slice(rows.stop, into.shape[2])):
        if before is None:
            into[:, :, rest].zero_()
        elif into is not before:
            into[:, :, rest].copy_(before[:, :, rest])
    if before is None:
        into[:, :, rows].copy_(part)
    else:
        torch.add(before[:, :, rows], part, out=into[:, :, rows])

"""What a caller wants done to the rows of a sum: the RMSNorm that follows in a transformer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.ir.operators.forms import NORM, NORM_EPS, NORM_WEIGHT, RESIDUAL


class RmsNorm(NamedTuple):
    """`z = y + residual` and `z / sqrt(mean(z ** 2) + eps) * weight`, row by row, for a sum y: `[m, n]`, or the
    rank's own rows of it, `[m/W, n]`.

    weight: `[n]`, the same on every rank. residual: of the shape of y, where every rank has all rows the same on each;
    None: that of the call, if it has one. Both in the dtype of y. eps: above 0.
    """

    weight: torch.Tensor
    residual: torch.Tensor | None = None
    eps: float = NORM_EPS


def with_norm(given: dict[str, Any]) -> dict[str, Any]:
    """What a call was passed, its norm in the words of schemas: norm_weight, norm_eps, and residual if it has one.

    As it is where that cannot be said: no RmsNorm, one without a weight, or a second residual.
    """
    norm = given[NORM]
    has_two = isinstance(norm, RmsNorm) and norm.residual is not None and given.get(RESIDUAL) is not None
    if not isinstance(norm, RmsNorm) or norm.weight is None or has_two:
        return given
    words = {name: each for name, each in given.items() if name != NORM}
    words |= {} if norm.residual is None else {RESIDUAL: norm.residual}
    return {**words, NORM_WEIGHT: norm.weight, "norm_eps": norm.eps}

"""What a caller wants done to the rows of a sum: the RMSNorm that follows in a transformer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.ir.epilogue import NORM_EPS, NORM_WEIGHT, RESIDUAL


class RmsNorm(NamedTuple):
    """`z = y + residual` and `z / sqrt(mean(z ** 2) + eps) * weight`, row by row, for a sum y: `[m, n]`, or the
    rank's own rows of it, `[m/W, n]`.

    weight: `[n]`, the same on every rank. residual: of the shape of y, where every rank has all rows the same on each;
    None: that of the call, if it has one. Both in the dtype of y. eps: above 0.
    """

    weight: torch.Tensor
    residual: torch.Tensor | None = None
    eps: float = NORM_EPS


# The fields, by the names under which plans know them.
FIELDS = (NORM_WEIGHT, RESIDUAL, "eps")

"""What type checkers are told of the keywords of operators and layers, each a case of the one before.

An overload names what decides the type of the result, and takes the rest as one of these. The signature that runs names
every keyword; a test holds both, and the operator's record, together.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import torch

Save = Literal["gathered", "shard", "columns"]


class NormedSum(TypedDict, total=False):
    """Beside the factors of a sum that ends with a norm."""

    residual: torch.Tensor | None
    scale_x: torch.Tensor | None
    scale_w: torch.Tensor | None
    out_dtype: torch.dtype | None


class PlainSum(NormedSum, total=False):
    """Beside the factors of a sum."""

    bias: torch.Tensor | None
    activation: str | None


class SeveralWeights(TypedDict, total=False):
    """Beside gathered rows and several weights."""

    m: int | None
    bias: torch.Tensor | None
    activation: str | None
    scale_x: torch.Tensor | None
    scale_w: torch.Tensor | None
    out_dtype: torch.dtype | None
    plan: str | None


class OneWeight(SeveralWeights, total=False):
    """Beside gathered rows and one weight."""

    residual: torch.Tensor | None
    gate: torch.Tensor | None


class NormedLinear(TypedDict, total=False):
    """Beside the factors of a linear layer whose rows are scattered and normed."""

    dim: int
    residual: torch.Tensor | None
    main_grad: bool
    plan: str | None
    backward_plan: str | None


class ScatteredLinear(NormedLinear, total=False):
    """Beside the factors of a linear layer whose rows are scattered."""

    activation: str | None


class GatheredLinear(ScatteredLinear, total=False):
    """Beside the factors of a linear layer whose rows are gathered."""

    size: int | None
    gate: torch.Tensor | None
    save: Save

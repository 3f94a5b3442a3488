"""Parts of a transformer block: query, key and value over one gather, and the gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from overweave.functional import all_gather_linear
from overweave.layers.linear import ColumnParallelLinear, RowParallelLinear, local
from overweave.memory.group import GroupLike
from overweave.ops.keywords import Save


class QkvParallelLinear(nn.Module):
    """Query, key and value of the same rows: three column-parallel layers, `q`, `k` and `v`, over one gather.

    widths: of query, key and value, each of which W must divide. dim, save: as of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        bias: bool = False,
        group: GroupLike = None,
        *,
        dim: int | None = None,
        save: Save = "gathered",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.dim, self.save = group, dim, save
        options: dict[str, Any] = {"dim": dim, "save": save, "device": device, "dtype": dtype}
        self.q, self.k, self.v = (ColumnParallelLinear(in_features, n, bias, group, **options) for n in widths)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: `[.., S/W, .., k]`, or whole without `dim`. Returns q, k and v: this rank's columns of all rows."""
        if self.dim is None:
            return self.q(x), self.k(x), self.v(x)
        layers = (self.q, self.k, self.v)
        biases = [each for layer in layers if (each := local(layer.bias)) is not None]
        bias = torch.cat(biases) if biases else None
        weights = [layer.weight for layer in layers]
        q, k, v = all_gather_linear(x, weights, bias, self.group, dim=self.dim, save=self.save)
        return q, k, v


class SwiGluMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`: the gather of x overlaps with gate and up, the sum over ranks with down.

    dim: along which the rows of x and of the result are sharded; None: both are whole on every rank.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        group: GroupLike = None,
        *,
        dim: int | None = None,
        save: Save = "gathered",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.dim, self.save = group, dim, save
        options: dict[str, Any] = {"dim": dim, "device": device, "dtype": dtype}
        self.gate = ColumnParallelLinear(features, inner, False, group, save=save, **options)
        self.up = ColumnParallelLinear(features, inner, False, group, save=save, **options)
        self.down = RowParallelLinear(inner, features, False, group, **options)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: `[.., S/W, .., k]`, or `[.., k]` without `dim`; the result has its shape. residual: added to it."""
        if self.dim is None:
            inner = silu(self.gate(x)) * self.up(x)
        else:
            inner = all_gather_linear(
                x,
                self.up.weight,
                None,
                self.group,
                dim=self.dim,
                gate=self.gate.weight,
                activation="silu",
                save=self.save,
            )
        result: torch.Tensor = self.down(inner, residual)
        return result

"""Tensor-parallel linear layers, named as in Megatron-LM, and blocks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import silu

from overweave.errors import InputError
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.layers.replicated import replicated_linear
from overweave.memory.group import GroupLike, process_group_of
from overweave.ops.keywords import Save


def own_shard(whole: torch.Tensor, dim: int, group: GroupLike, name: str) -> nn.Parameter:
    """Return this rank's shard of a weight along a dimension, as a copy; with a DeviceMesh a DTensor.

    name: of the weight, in errors. Raises InputError if the number of ranks does not divide the dimension.
    """
    process_group = process_group_of(group)
    ranks, rank = process_group.size(), process_group.rank()
    if whole.shape[dim] % ranks:
        found = f"{whole.shape[dim]} does not divide by {ranks} ranks"
        raise InputError(f"{name}, cut along dimension {dim}", found, "Choose a width that does, or fewer ranks")
    part = whole.detach().chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
    if isinstance(group, DeviceMesh):
        part = DTensor.from_local(part, group, [Shard(dim)], run_check=False)
    return nn.Parameter(part, requires_grad=whole.requires_grad)


class ColumnParallelLinear(nn.Module):
    """Each rank computes its columns: `[.., n/W]` of `nn.Linear(k, n)` on all rows.

    dim: the dimension along which x is sharded, `[B, S/W, k]` along 1; its all-gather overlaps with the matmul. None: x
    is the same on every rank. save: the tensor that is saved for the gradient of the weight, see
    `overweave.functional.all_gather_linear`.
    weight `[n/W, k]` and bias `[n/W]` are shards of those of `nn.Linear(k, n)` with the same seed; with a DeviceMesh as
    group they are DTensors. Raises InputError if W does not divide n.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: GroupLike = None,
        *,
        dim: int | None = None,
        save: Save = "gathered",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_parameters(nn.Linear(in_features, out_features, bias, device, dtype), group)
        self.dim, self.save = dim, save

    @classmethod
    def of(cls, whole: nn.Linear, group: GroupLike = None, *, dim: int | None = None, save: Save = "gathered") -> Self:
        """Build this rank's layer from a whole one. Raises InputError for a forward that is not `nn.Linear`'s."""
        check_linear(whole, cls.__name__)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_parameters(whole, group)
        layer.dim, layer.save = dim, save
        return layer

    def _set_parameters(self, whole: nn.Linear, group: GroupLike) -> None:
        """Set this rank's shards of weight and bias."""
        self.group, self.in_features, self.out_features = group, whole.in_features, whole.out_features
        self.weight = own_shard(whole.weight, 0, group, "ColumnParallelLinear: out_features")
        self.bias = (
            None if whole.bias is None else own_shard(whole.bias, 0, group, "ColumnParallelLinear: out_features")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[.., S/W, .., k]`, or `[.., k]` if `dim` is None. Returns `[.., n/W]` of all rows."""
        if self.dim is None:
            return replicated_linear(x, local(self.weight), local(self.bias), self.group)
        return all_gather_linear(x, self.weight, self.bias, self.group, dim=self.dim, save=self.save)

    def extra_repr(self) -> str:
        """Return the text of the layer when a model is printed."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dim={self.dim}"


class RowParallelLinear(nn.Module):
    """Each rank multiplies its columns of x; the sum over ranks overlaps with the matmul.

    dim: the dimension along which the sum is scattered, `[B, S/W, n]` along 1. None: every rank gets all
    rows. weight `[n, k/W]` is a shard of that of `nn.Linear(k, n)`, bias `[n]` is whole, the same on every rank, and
    added once. Raises InputError if W does not divide k.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: GroupLike = None,
        *,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_parameters(nn.Linear(in_features, out_features, bias, device, dtype), group)
        self.dim = dim

    @classmethod
    def of(cls, whole: nn.Linear, group: GroupLike = None, *, dim: int | None = None) -> Self:
        """Build this rank's layer from a whole one. Raises InputError for a forward that is not `nn.Linear`'s."""
        check_linear(whole, cls.__name__)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_parameters(whole, group)
        layer.dim = dim
        return layer

    def _set_parameters(self, whole: nn.Linear, group: GroupLike) -> None:
        """Set this rank's shard of the weight, and the whole bias."""
        self.group, self.in_features, self.out_features = group, whole.in_features, whole.out_features
        self.weight = own_shard(whole.weight, 1, group, "RowParallelLinear: in_features")
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: `[.., k/W]`. Returns the sum, `[.., S/W, .., n]`, or all rows if `dim` is None. residual: added to it."""
        if self.dim is None:
            y: torch.Tensor = linear_all_reduce(x, self.weight, self.bias, self.group, residual=residual)
            return y
        return linear_reduce_scatter(x, self.weight, self.bias, self.group, dim=self.dim, residual=residual)

    def extra_repr(self) -> str:
        """Return the text of the layer when a model is printed."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dim={self.dim}"


def check_linear(whole: nn.Module, name: str) -> None:
    """Raise InputError for a layer whose forward is not `nn.Linear`'s. name: of the class to build, in the error."""
    kind = type(whole)
    if kind.forward is not nn.Linear.forward or "forward" in vars(whole):
        found = f"the forward of this {kind.__name__} is its own"
        raise InputError(
            f"{name}.of an nn.Linear", found, "Shard the layers it consists of, or subclass overweave's layer"
        )


def local(parameter: Any) -> Any:
    """Return the local shard of a DTensor, differentiably; any other value as it is."""
    return parameter.to_local() if hasattr(parameter, "device_mesh") else parameter


def _is_untouched(layer: Any) -> bool:
    """Whether nobody has replaced, hooked or parametrized a column-parallel layer: only then a call of it computes with
    its weight and bias, and nothing else."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is ColumnParallelLinear and not hooks and "forward" not in vars(layer)


class QkvParallelLinear(nn.Module):
    """Query, key and value of the same rows: three column-parallel layers, `q`, `k` and `v`, over one gather. One that
    was hooked, replaced or parametrized, or has no bias where others have, is called, and gathers for itself.

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
        """x: `[.., S/W, .., k]`, or all rows if `dim` is None. Returns q, k and v: this rank's columns of all rows."""
        layers = (self.q, self.k, self.v)
        if self.dim is None or not all(map(_is_untouched, layers)):
            return self.q(x), self.k(x), self.v(x)
        biases = [each for layer in layers if (each := local(layer.bias)) is not None]
        if len(biases) not in (0, len(layers)):
            return self.q(x), self.k(x), self.v(x)
        bias = torch.cat(biases) if biases else None
        weights = [layer.weight for layer in layers]
        q, k, v = all_gather_linear(x, weights, bias, self.group, dim=self.dim, save=self.save)
        return q, k, v


class SwiGluMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`: the all-gather of x overlaps with gate and up, the reduce-scatter with down.

    dim: along which x and the result are sharded; None: both are whole on every rank, and down all-reduces. Where gate
    or up was hooked, replaced or parametrized, both are called, and each gathers for itself.
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
        """x: `[.., S/W, .., k]`, or `[.., k]` if `dim` is None. Returns that shape. residual: added to the result."""
        if self.dim is None or not (_is_untouched(self.gate) and _is_untouched(self.up)):
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

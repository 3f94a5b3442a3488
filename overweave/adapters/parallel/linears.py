"""The linear layers of a plan: `nn.Linear`s whose forward is overweave's and whose weights stay DTensors.

A style changes the class of a layer, and nothing that it holds: state dicts, hooks and optimizers see what they saw.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement

from overweave.adapters.parallel.gathering import Gathering
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.layers.linear import local
from overweave.layers.replicated import replicated_linear


class Place(NamedTuple):
    """Where a layer of a plan stands. given, made: the placements of its input and its result."""

    mesh: DeviceMesh
    given: Placement
    made: Placement


class ColwiseLinear(nn.Linear):
    """Each rank computes its columns of all rows."""

    overweave_place: Place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: a `Gathering`, or what the style's `input_layouts` say: rows of all ranks, or this rank's."""
        mesh, given, _ = self.overweave_place
        if torch.compiler.is_compiling():
            return _by_dtensor(self, input)
        if isinstance(input, Gathering):
            return input.linear(local(self.weight), local(self.bias))
        x = local_part(input, mesh, given)
        if given.is_shard():
            y: torch.Tensor = all_gather_linear(x, self.weight, self.bias, mesh, dim=_dim(given))
            return y
        return replicated_linear(x, local(self.weight), local(self.bias), mesh)


class RowwiseLinear(nn.Linear):
    """Each rank multiplies its columns of the input; the products are summed over ranks."""

    overweave_place: Place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: this rank's columns. Returns all rows of the sum, or this rank's, as `output_layouts` say."""
        mesh, given, made = self.overweave_place
        if torch.compiler.is_compiling():
            return _by_dtensor(self, input)
        x = local_part(input, mesh, given)
        if made.is_shard():
            return linear_reduce_scatter(x, self.weight, self.bias, mesh, dim=_dim(made))
        y: torch.Tensor = linear_all_reduce(x, self.weight, self.bias, mesh)
        return y


def local_part(x: Any, mesh: DeviceMesh, wanted: Placement) -> torch.Tensor:
    """The local part of a tensor: of a DTensor, once it has the wanted placement; any other is that part."""
    if isinstance(x, DTensor):
        if x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        x = x.to_local()
    # A collective of torch's that still runs: a differentiable operation waits for it.
    part: torch.Tensor = x.clone() if isinstance(x, AsyncCollectiveTensor) else x
    return part


def _by_dtensor(layer: Any, x: Any) -> torch.Tensor:
    """As torch's own styles compute it, which compilers read: its collectives are fused in the graph."""
    mesh, given, made = layer.overweave_place
    whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [given], run_check=False)
    wanted = layer.overweave_multiplies
    if whole.placements != (wanted,):
        whole = whole.redistribute(placements=[wanted])
    y: Any = nn.functional.linear(whole, layer.weight, layer.bias)
    if y.placements != (made,):
        y = y.redistribute(placements=[made])
    result: torch.Tensor = y.to_local()
    return result


def _dim(placement: Any) -> int:
    dim: int = placement.dim
    return dim

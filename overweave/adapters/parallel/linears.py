"""The linear layers of a plan: `nn.Linear`s whose forward is overweave's and whose weights stay DTensors.

A style changes the class of a layer, and nothing that it holds: state dicts, hooks and optimizers see what they saw.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement

from overweave.adapters.forwards import PLAIN, obstacle_of
from overweave.adapters.parallel.gathering import Gathering
from overweave.adapters.report import SITES, site
from overweave.errors import InputError, OverweaveError
from overweave.functional import (
    all_gather_linear,
    check_untransformed,
    is_transformed,
    linear_all_reduce,
    linear_reduce_scatter,
)
from overweave.layers.linear import local
from overweave.layers.replicated import replicated_linear
from overweave.ops.call.operands import DTYPES
from overweave.ops.dispatch.route import place_of


class LayerPlacement(NamedTuple):
    """Where a layer of a plan stands. path: in the model that the plan was for. group: the name of the mesh's. given,
    made: the placements of its input and its result. multiplies: the placement of the input that the matmul itself
    wants. rows: along which rows are gathered or scattered, if they are."""

    path: str
    mesh: DeviceMesh
    group: str
    given: Placement
    made: Placement
    multiplies: Placement
    rows: Placement | None

    @classmethod
    def of(
        cls, path: str, mesh: DeviceMesh, placements: tuple[Placement, Placement, Placement], rows: Placement
    ) -> LayerPlacement:
        """placements: given, made and multiplies."""
        return cls(path, mesh, place_of(mesh).name, *placements, rows if rows.is_shard() else None)


class ColwiseLinear(nn.Linear):
    """Each rank computes its columns of all rows."""

    overweave_place: LayerPlacement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: a `Gathering`, or what the style's `input_layouts` say: rows of all ranks, or this rank's."""
        return _answered(self, input, "Colwise", _columns)


class RowwiseLinear(nn.Linear):
    """Each rank multiplies its columns of the input; the products are summed over ranks."""

    overweave_place: LayerPlacement

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: this rank's columns. Returns all rows of the sum, or this rank's, as `output_layouts` say."""
        return _answered(self, input, "Rowwise", _rows)


@cache
def derived(kind: type[nn.Linear], owner: type[nn.Linear]) -> type[nn.Linear]:
    """The class of a layer of a plan that is of a subclass of `nn.Linear` without a forward of its own."""
    return kind if owner is nn.Linear else type(f"{kind.__name__}Of{owner.__name__}", (kind, owner), {})


def local_part(x: Any, wanted: Placement) -> tuple[torch.Tensor, int | None]:
    """The local part of a tensor: of a DTensor, once it has the wanted placement, beside the whole length of the
    dimension along which that is sharded; any other tensor is that part, and does not know the length."""
    size = None
    if isinstance(x, DTensor):
        if x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        size = x.shape[wanted.dim] if wanted.is_shard() else None  # type: ignore[attr-defined]
        x = x.to_local()
    # A collective of torch's that still runs: a differentiable operation waits for it.
    return x.clone() if isinstance(x, AsyncCollectiveTensor) else x, size


def _answered(layer: Any, x: Any, name: str, compute: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _by_dtensor(layer, x)
    place, weight, bias, counts = layer.overweave_place, layer.weight, layer.bias, SITES.get(name) or site(name)
    reason = _obstacle(place, x, weight)
    if reason:
        counts.by_torch[reason] += 1
        return _by_dtensor(layer, x)
    counts.by_overweave += 1
    if x.__class__ is Gathering and hasattr(type(layer), "_get_fsdp_state"):
        x = x.view_as(x)  # FSDP2 frees the weight of a layer that it shards by itself before the gather's gradient
    try:
        if is_transformed():  # asked before torch takes DTensors apart, which says nothing of the layer
            check_untransformed(name, place.group, (x,))
        y: torch.Tensor = compute(place, x, weight, bias)
        return y
    except InputError as error:
        if place.path and place.path not in error.asked:
            raise _at(place.path, error) from None
        raise


def _columns(place: LayerPlacement, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    if x.__class__ is Gathering and x.group == place.group and x.is_as_given:
        return x.linear(local(weight), local(bias), weight)
    part, size = local_part(x, place.given)
    if not place.given.is_shard():
        return replicated_linear(part, local(weight), local(bias), place.group)
    size = size if size is not None and size % place.mesh.size() else None
    y: torch.Tensor = all_gather_linear(part, weight, bias, place.mesh, dim=_dim(place.given), size=size)
    return y


def _rows(place: LayerPlacement, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    part, _ = local_part(x, place.given)
    if place.made.is_shard():
        return linear_reduce_scatter(part, local(weight), local(bias), place.group, dim=_dim(place.made))
    y: torch.Tensor = linear_all_reduce(part, local(weight), local(bias), place.group)
    return y


def _obstacle(place: LayerPlacement, x: Any, weight: Any) -> str:
    """Why a call is torch's; empty: it is ours."""
    if not isinstance(weight, DTensor):
        return f"its weight is a {type(weight).__name__}"
    if (
        weight._local_tensor.__class__ not in PLAIN or weight.dtype not in DTYPES
    ):  # asked without a call: every one asks
        return obstacle_of(weight)
    if weight._spec.mesh is not place.mesh and weight._spec.mesh.ndim != 1:
        return "its weight lies on a mesh of several dimensions"
    if isinstance(x, DTensor) and x.device_mesh != place.mesh:
        return "its input lies on another mesh"
    if place.rows is not None and _dim(place.rows) % x.dim() == x.dim() - 1:
        return f"{place.rows} of it is no dimension of rows"
    return ""


def _by_dtensor(layer: Any, x: Any) -> torch.Tensor:
    """As torch's own styles compute it, which compilers read: its collectives are fused in the graph."""
    _, mesh, _, given, made, wanted, _ = layer.overweave_place
    whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [given], run_check=False)
    if whole.placements != (wanted,):
        whole = whole.redistribute(placements=[wanted])
    y: Any = nn.functional.linear(whole, layer.weight, layer.bias)
    if y.placements != (made,):
        y = y.redistribute(placements=[made])
    result: torch.Tensor = y.to_local()
    return result


def _at(path: str, error: InputError) -> OverweaveError:
    """The error, which names the layer, too."""
    return type(error)(f"layer {path!r}: {error.asked}", error.found, error.cure)


def _dim(placement: Any) -> int:
    dim: int = placement.dim
    return dim

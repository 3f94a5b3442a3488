"""A call of a fused author's kernel: its arguments by name, and where each exchanged tensor lies for the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, Apply
from overweave.ir.tensors import all_to_all_source


@dataclass(frozen=True)
class AuthoredKernel:
    """The fused kernel of a plan with what is the same in every call.

    function: the jitted kernel. places: parameter -> (tensor, buffer that holds it for the kernel), of exchanged
    tensors. chosen: the parameter whose own shard the kernel reads from the caller; what arrives has a parameter too.
    away: what tiles store at peers. shapes: parameter -> tensor and dimension of the call whose extent it is.
    is_persistent: programs take tiles until none is left, else each takes one. options: of the launch.
    """

    function: Any
    space: TileSpace
    places: Mapping[str, tuple[str, str]]
    chosen: str | None
    away: Operand | None
    is_persistent: bool
    options: Mapping[str, int]
    shapes: Mapping[str, tuple[str, int]]

    def arguments(self, given: Mapping[str, Any], buffer: Callable[[str], torch.Tensor | None]) -> dict[str, Any]:
        """The author's arguments, with the workspace in place of what is exchanged.

        buffer: the workspace's matrix by name; None for what is the caller's, as all is in a group of one.
        """
        placed = {name: buffer(place[1]) for name, place in self.places.items()}
        arrived = {f"overweave_{self.chosen}": placed.pop(self.chosen)} if self.chosen else {}
        extents = {name: shape_of(given[tensor])[at] for name, (tensor, at) in self.shapes.items()}
        return (
            arrived
            | extents
            | {
                name: value if (matrix := placed.get(name)) is None else _with_matrix(value, matrix)
                for name, value in given.items()
            }
        )


def buffers_of_tensors(plan: Plan, space: TileSpace, wanted: Iterable[str]) -> dict[str, tuple[str, str]]:
    """parameter -> (tensor, buffer), for every exchanged tensor, as the plan's Applies say; the workspace's, if any."""
    homes = {buffer.name: buffer.home for buffer in plan.schedule.buffers}
    held: dict[str, str] = {}
    for operation in plan.schedule.operations:
        if isinstance(operation, Apply):
            for need in (*operation.needs, *operation.late_needs):
                tensor = all_to_all_source(need.tensor)
                if tensor not in held or homes[need.region.buffer] != INPUT:
                    held[tensor] = need.region.buffer
            own = (
                made for made in operation.makes if made.region.rank == operation.rank
            )  # a table says where others lie
            held |= {all_to_all_source(made.tensor): made.region.buffer for made in own}
    operands, names = (*space.loads, *space.stores), set(wanted)
    return {one.parameter: (one.tensor, held[one.tensor]) for one in operands if one.tensor in names}


def tensor_of(value: Any) -> torch.Tensor | None:
    """The tensor behind an argument: a tensor, or the base of a descriptor."""
    if isinstance(value, torch.Tensor):
        return value
    base = getattr(value, "base", None) if hasattr(value, "block_shape") else None  # an array of numpy has a base too
    return base if isinstance(base, torch.Tensor) else None


def shape_of(value: Any) -> tuple[int, ...]:
    """The extents of a tensor, or of what a descriptor describes."""
    tensor = tensor_of(value)
    assert tensor is not None
    return tuple(tensor.shape) if value is tensor else tuple(value.shape)


def _with_matrix(value: Any, matrix: torch.Tensor) -> Any:
    """The workspace's matrix as the argument was: a tensor, or a descriptor with the same blocks."""
    if isinstance(value, torch.Tensor):
        return matrix
    return type(value).from_tensor(matrix, value.block_shape, value.padding)

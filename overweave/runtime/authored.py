"""A call of a fused author's kernel: its arguments by name, and where each exchanged tensor lies for the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overweave.ir.footprint import TileSpace
from overweave.ir.plan import APPLY, COPY, PART, Plan, TileRow
from overweave.ir.schedule import INPUT, Apply, Put


@dataclass(frozen=True)
class AuthoredKernel:
    """The fused kernel of a plan with what is the same in every call.

    function: the jitted kernel. places: parameter -> (tensor, buffer that holds it for the kernel), of exchanged
    tensors. chosen: the parameter whose own shard the kernel reads from the caller; what arrives has a parameter too.
    is_persistent: programs take tiles until none is left, else each takes one. options: of the launch.
    """

    function: Any
    space: TileSpace
    places: Mapping[str, tuple[str, str]]
    chosen: str | None
    is_persistent: bool
    options: Mapping[str, int]

    def arguments(self, given: Mapping[str, Any], buffer: Callable[[str], torch.Tensor | None]) -> dict[str, Any]:
        """The author's arguments, with the workspace in place of what is exchanged.

        buffer: the workspace's matrix by name; None for what is the caller's, as all is in a group of one.
        """
        placed = {name: buffer(place[1]) for name, place in self.places.items()}
        arrived = {f"overweave_{self.chosen}": placed.pop(self.chosen)} if self.chosen else {}
        return arrived | {
            name: value if (matrix := placed.get(name)) is None else _in_place_of(value, matrix)
            for name, value in given.items()
        }


def places_of(plan: Plan, space: TileSpace, wanted: Iterable[str]) -> dict[str, tuple[str, str]]:
    """parameter -> (tensor, buffer), for every exchanged tensor, as the plan's Applies say; the workspace's, if any."""
    homes = {buffer.name: buffer.home for buffer in plan.schedule.buffers}
    held: dict[str, str] = {}
    for operation in plan.schedule.operations:
        if isinstance(operation, Apply):
            for need in (*operation.needs, *operation.late_needs):
                tensor = _name(need.tensor)
                if tensor not in held or homes[need.region.buffer] != INPUT:
                    held[tensor] = need.region.buffer
            held |= {_name(made.tensor): made.region.buffer for made in operation.makes}
    operands, names = (*space.loads, *space.stores), set(wanted)
    return {one.parameter: (one.tensor, held[one.tensor]) for one in operands if one.tensor in names}


def _name(tensor: str) -> str:
    """The author's name of a tensor of which every rank has one of its own, such as `A.3`."""
    return tensor.split(".")[0]


def tiles_and_parts(rows: tuple[TileRow, ...]) -> tuple[int, int]:
    """How many tiles a table has, and how many parts behind them."""
    kinds = [row.kind for row in rows]
    return kinds.count(APPLY), kinds.count(PART)


def protocol_arguments(arrays: list[Any], tiles: int, parts: int, world_size: int) -> dict[str, Any]:
    """The compiler's own parameters by name. arrays: table, claims, signals, words, limits."""
    names = ("table", "claims", "signals", "words", "limits", "tiles", "parts", "world_size")
    return {f"overweave_{name}": value for name, value in zip(names, (*arrays, tiles, parts, world_size), strict=True)}


def slice_arguments(targets: torch.Tensor, plan: Plan, rank: int, queue: str) -> dict[str, Any]:
    """The compiler's parameters for what tiles carry, if they carry anything. targets: memory/lower.py."""
    slices = [row.kind for row in plan.tile_order(rank, queue).rows].count(COPY)
    carries = any(isinstance(one, Put) and one.queue == queue for one in plan.schedule.operations)
    return {"overweave_targets": targets, "overweave_slices": slices} if carries else {}


def tensor_of(value: Any) -> torch.Tensor | None:
    """The tensor behind an argument: a tensor, or the base of a descriptor."""
    base = getattr(value, "base", value)
    return base if isinstance(base, torch.Tensor) else None


def _in_place_of(value: Any, matrix: torch.Tensor) -> Any:
    """The workspace's matrix as the argument was: a tensor, or a descriptor with the same blocks."""
    if isinstance(value, torch.Tensor):
        return matrix
    return type(value).from_tensor(matrix, value.block_shape)

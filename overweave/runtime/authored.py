"""A call of an author's fused kernel: its arguments by name, and the buffer of each communicated tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, Apply
from overweave.ir.tensors import all_to_all_source


@dataclass(frozen=True)
class AuthoredKernel:
    """The fused kernel of a plan with what is the same in every call.

    function: the jitted kernel. buffers: parameter -> (tensor, buffer that the kernel accesses), of communicated
    tensors. dual_source: the parameter whose own shard the kernel reads from the caller; the rows that arrive have a
    parameter of their own. peer_store: the operand that tiles store at peers. is_persistent: programs claim tiles until
    none is left, else each takes one. options: of the launch. shapes: parameter -> (tensor, dimension): its extent.
    """

    function: Any
    space: TileSpace
    buffers: Mapping[str, tuple[str, str]]
    dual_source: str | None
    peer_store: Operand | None
    is_persistent: bool
    options: Mapping[str, int]
    shapes: Mapping[str, tuple[str, int]]

    @cached_property
    def columns(self) -> dict[str, int]:
        """The columns of every tensor that the kernel accesses."""
        return {one.tensor: one.cols for one in (*self.space.loads, *self.space.stores)}

    def arguments(
        self, author_arguments: Mapping[str, Any], matrix_of: Callable[[str], torch.Tensor | None]
    ) -> dict[str, Any]:
        """Return the kernel's arguments: the author's, with workspace matrices in place of communicated tensors.

        author_arguments: by name. matrix_of: returns the workspace's matrix of a buffer; None for a buffer
        of the caller's, as all are in a group of one.
        """
        matrices = {name: matrix_of(buffer) for name, (_, buffer) in self.buffers.items()}
        arrived = {f"overweave_{self.dual_source}": matrices.pop(self.dual_source)} if self.dual_source else {}
        extents = {name: shape_of(author_arguments[tensor])[at] for name, (tensor, at) in self.shapes.items()}
        return (
            arrived
            | extents
            | {
                name: value if (matrix := matrices.get(name)) is None else _with_matrix(value, matrix)
                for name, value in author_arguments.items()
            }
        )


def exchanged_tensors(kernel: AuthoredKernel, author_arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the caller's communicated tensors by name, shaped as the schedule's matrices."""
    tensors = {tensor: tensor_of(author_arguments[parameter]) for parameter, (tensor, _) in kernel.buffers.items()}
    return {name: one.view(-1, kernel.columns[name]) for name, one in tensors.items() if one is not None}


def buffers_of_tensors(plan: Plan, space: TileSpace, tensors: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return parameter -> (tensor, buffer) of the communicated tensors, from the plan's Applies.

    tensors: the communicated ones. A tensor that lies both at the caller and in the workspace gets the latter.
    """
    homes = {buffer.name: buffer.home for buffer in plan.schedule.buffers}
    buffers: dict[str, str] = {}
    for operation in plan.schedule.operations:
        if isinstance(operation, Apply):
            for need in (*operation.needs, *operation.late_needs):
                tensor = all_to_all_source(need.tensor)
                if tensor not in buffers or homes[need.region.buffer] != INPUT:
                    buffers[tensor] = need.region.buffer
            # A kernel finds its stores at peers in a table of addresses.
            own = (output for output in operation.makes if output.region.rank == operation.rank)
            buffers |= {all_to_all_source(output.tensor): output.region.buffer for output in own}
    operands, names = (*space.loads, *space.stores), set(tensors)
    return {one.parameter: (one.tensor, buffers[one.tensor]) for one in operands if one.tensor in names}


def tensor_of(value: Any) -> torch.Tensor | None:
    """Return the tensor of an argument: itself, or the base of a descriptor; None for other values."""
    if isinstance(value, torch.Tensor):
        return value
    base = getattr(value, "base", None) if hasattr(value, "block_shape") else None  # a numpy array has a base, too
    return base if isinstance(base, torch.Tensor) else None


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the extents of a tensor, or of a descriptor."""
    tensor = tensor_of(value)
    assert tensor is not None
    return tuple(tensor.shape) if value is tensor else tuple(value.shape)


def _with_matrix(value: Any, matrix: torch.Tensor) -> Any:
    """Return a matrix in the form of the argument `value`: a tensor, or a descriptor with the same blocks."""
    if isinstance(value, torch.Tensor):
        return matrix
    return type(value).from_tensor(matrix, value.block_shape, value.padding)

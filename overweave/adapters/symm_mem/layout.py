"""How a fused operator lays out its results: exactly as its Meta kernel does, which compilers believe.

A compiled graph holds the strides that the Meta kernel promised, those of dimensions of size 1 too, and refuses others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from overweave.compat.torch_names import OpOverload, pytree


class Layout(NamedTuple):
    """Sizes and strides of a tensor, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def promised(operator: OpOverload, arguments: Sequence[object], options: dict[str, object]) -> list[Layout]:
    """Layouts of all result tensors, as the Meta kernel of an operator promises them for these arguments."""
    arguments, options = pytree.tree_map_only(torch.Tensor, _without_data, (tuple(arguments), options))
    leaves = pytree.tree_leaves(operator(*arguments, **options))
    return [Layout(tuple(each.shape), each.stride()) for each in leaves if isinstance(each, torch.Tensor)]


def laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor of the shape of a layout, with the strides of that layout: as it is, or a view, or a copy."""
    own = tensor.stride()
    if own == layout.stride:
        return tensor
    matters = [index for index, extent in enumerate(layout.shape) if extent != 1]
    if all(own[index] == layout.stride[index] for index in matters):
        return tensor.as_strided(layout.shape, layout.stride)
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

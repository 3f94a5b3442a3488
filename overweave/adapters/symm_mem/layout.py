"""The strides of a fused operator's results: exactly those of its Meta kernel.

A compiled graph asserts the strides of the Meta kernel, also of dimensions of size 1.
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
    """Return the layouts of all result tensors, from the Meta kernel of an operator."""
    arguments, options = pytree.tree_map_only(torch.Tensor, _without_data, (tuple(arguments), options))
    leaves = pytree.tree_leaves(operator(*arguments, **options))
    return [Layout(tuple(each.shape), each.stride()) for each in leaves if isinstance(each, torch.Tensor)]


def laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor with the strides of a layout: itself, a view or a copy."""
    own = tensor.stride()
    if own == layout.stride:
        return tensor
    matters = [index for index, extent in enumerate(layout.shape) if extent != 1]
    if all(own[index] == layout.stride[index] for index in matters):
        return tensor.as_strided(layout.shape, layout.stride)
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

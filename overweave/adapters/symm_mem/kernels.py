"""The kernels that `install` registers for torch's fused operators.

Whether overweave supports a call is decided once for each signature: shapes, strides, dtypes, options. Any other call
runs the kernel from before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from overweave.adapters.report import Site, site
from overweave.adapters.symm_mem.forms import FusedOperator
from overweave.compat.torch_names import OpOverload, is_test_mode, pytree
from overweave.errors import InputError
from overweave.runtime.library.library import wants_torch


class Layout(NamedTuple):
    """Sizes and strides of a tensor, in elements: a compiled graph asserts those of the Meta kernel, of any size."""

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


MOST_SIGNATURES = 4096
Original = Callable[..., Any]


class Decision(NamedTuple):
    """obstacle: why overweave does not support a call; empty if it does. layouts: of the results."""

    obstacle: str
    layouts: tuple[Layout, ...] = ()


@dataclass
class FusedKernelEntry:
    """The kernel of a fused operator on one kind of device. original: `call_boxed` of the kernel from before.

    is_strict: whether a call that overweave does not support is an error. decisions: signature -> decision.
    """

    form: FusedOperator
    original: Original
    is_strict: bool
    decisions: dict[object, Decision] = field(default_factory=dict)

    def __call__(self, keys: object, *arguments: Any, **options: Any) -> Any:
        """Run the operator. Raises InputError for an unsupported call if is_strict, and what the call raises."""
        if wants_torch() or is_test_mode():
            return self.original(keys, *arguments, **options)
        counts, decision = site(self.form.name), self._decide(arguments, options)
        if decision.obstacle:
            return self._fall_through(counts, decision.obstacle, keys, *arguments, **options)
        with torch.no_grad(), torch.amp.autocast_mode.autocast(_device(arguments), enabled=False):
            results = self.form.compute(*arguments, **options)
        counts.by_overweave += 1
        return _with_promised_strides(self.form.operator, results, decision.layouts)

    def _decide(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Decision:
        """Return the decision for the signature of a call, once computed."""
        key = (*map(_signature_of, arguments), *map(_signature_of, options.items()))
        known = self.decisions.get(key)
        if known is None:
            if len(self.decisions) >= MOST_SIGNATURES:
                self.decisions.clear()
            obstacle = self.form.obstacle(*arguments, **options)
            layouts = () if obstacle else tuple(promised(self.form.operator, arguments, options))
            known = self.decisions[key] = Decision(obstacle, layouts)
        return known

    def _fall_through(self, counts: Site, reason: str, keys: object, *arguments: Any, **options: Any) -> Any:
        """Run the kernel from before and count why. Raises InputError if is_strict."""
        if self.is_strict:
            cure = "Change the call, or leave strict= out: torch's kernel answers it then"
            raise InputError(f"answer symm_mem::{self.form.name}", f"overweave does not take {reason}", cure)
        counts.by_torch[reason] += 1
        return self.original(keys, *arguments, **options)


def _signature_of(argument: Any) -> object:
    """Return the part of an argument that a decision depends on; of a group, its name."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device.type
    if isinstance(argument, (list, tuple)):
        return tuple(map(_signature_of, argument))
    return argument


def _device(arguments: tuple[Any, ...]) -> str:
    return str(arguments[0].device.type)


def _with_promised_strides(operator: Any, results: list[torch.Tensor | None], layouts: tuple[Layout, ...]) -> Any:
    """Return results with the promised strides, in the structure that the operator returns."""
    promises = iter(layouts)
    placed = [None if each is None else laid_out(each, next(promises)) for each in results]
    return placed[0] if len(operator._schema.returns) == 1 else (placed[0], placed[1:])

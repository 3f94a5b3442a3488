"""The kernels that `install` puts behind torch's fused operators, and the decision of each call.

A decision is made once for each signature: shapes, strides, dtypes, options. A call that overweave does not take goes
to the kernel that was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from overweave.adapters.report import Site, site
from overweave.adapters.symm_mem.forms import FusedOperator
from overweave.adapters.symm_mem.layout import Layout, laid_out, promised
from overweave.compat.torch_names import is_test_mode
from overweave.errors import InputError
from overweave.runtime.library.torch_fused import is_torch_asked

MOST_SIGNATURES = 4096
Original = Callable[..., Any]


class Decision(NamedTuple):
    """obstacle: why torch answers; empty if overweave does, which lays its results out so."""

    obstacle: str
    layouts: tuple[Layout, ...] = ()


@dataclass
class FusedKernelEntry:
    """Answers a fused operator on one kind of device. original: what answered it before, as `call_boxed` of a kernel.

    is_strict: whether a call that overweave does not take is an error.
    """

    form: FusedOperator
    original: Original
    is_strict: bool
    decisions: dict[object, Decision] = field(default_factory=dict)

    def __call__(self, keys: object, *arguments: Any, **options: Any) -> Any:
        """The results of torch's operator. Raises InputError if it must not fall through, and what the call raises."""
        if is_torch_asked() or is_test_mode():
            return self.original(keys, *arguments, **options)
        counts, decision = site(self.form.name), self._decide(arguments, options)
        if decision.obstacle:
            return self._fall_through(counts, decision.obstacle, keys, *arguments, **options)
        with torch.no_grad(), torch.amp.autocast_mode.autocast(_device(arguments), enabled=False):
            results = self.form.compute(*arguments, **options)
        counts.by_overweave += 1
        return _as_returned(self.form.operator, results, decision.layouts)

    def _decide(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Decision:
        key = (*map(_told, arguments), *map(_told, options.items()))
        known = self.decisions.get(key)
        if known is None:
            if len(self.decisions) >= MOST_SIGNATURES:
                self.decisions.clear()
            obstacle = self.form.obstacle(*arguments, **options)
            layouts = () if obstacle else tuple(promised(self.form.operator, arguments, options))
            known = self.decisions[key] = Decision(obstacle, layouts)
        return known

    def _fall_through(self, counts: Site, reason: str, keys: object, *arguments: Any, **options: Any) -> Any:
        if self.is_strict:
            cure = "Change the call, or leave strict= out: torch's kernel answers it then"
            raise InputError(f"answer symm_mem::{self.form.name}", f"overweave does not take {reason}", cure)
        counts.by_torch[reason] += 1
        return self.original(keys, *arguments, **options)


def _told(argument: Any) -> object:
    """All of an argument that a decision depends on; of a group, its name."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device.type
    if isinstance(argument, (list, tuple)):
        return tuple(map(_told, argument))
    return argument


def _device(arguments: tuple[Any, ...]) -> str:
    return str(arguments[0].device.type)


def _as_returned(operator: Any, results: list[torch.Tensor | None], layouts: tuple[Layout, ...]) -> Any:
    """Results with the promised strides, in the structure that the operator returns."""
    promises = iter(layouts)
    placed = [None if each is None else laid_out(each, next(promises)) for each in results]
    return placed[0] if len(operator._schema.returns) == 1 else (placed[0], placed[1:])

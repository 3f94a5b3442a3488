"""The forward of a class that others wrote, replaced for a while: of its instances that exist, and of those to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from overweave.errors import InputError
from overweave.ops.call.operands import DTYPES

PLAIN = (torch.Tensor, nn.Parameter, AsyncCollectiveTensor)
Forward = Callable[..., Any]


class ReplacedForward:
    """The forward of one class. original: that of its author."""

    def __init__(self, owner: type[nn.Module], forward: Forward) -> None:
        self.original: Forward = owner.forward
        self._owner, self._forward = owner, forward

    def register(self) -> None:
        """From now on overweave's forward answers. Raises InputError where it does already, or someone else's does."""
        self._check(self.original, "register", "Call register() once, before others replace it")
        self._owner.forward = self._forward

    def unregister(self) -> None:
        """The author's forward answers again. Raises InputError where overweave's does not answer."""
        self._check(self._forward, "unregister", "Take back what was put over it, or call register() first")
        self._owner.forward = self.original

    @property
    def is_registered(self) -> bool:
        """Whether overweave's forward answers."""
        return self._owner.forward is self._forward

    def _check(self, wanted: Forward, asked: str, cure: str) -> None:
        found = self._owner.forward
        if found is not wanted:
            where = f"{self._owner.__name__}.forward is {found.__module__}.{found.__qualname__}"
            raise InputError(f"{asked} with {self._owner.__module__}", where, cure)


def is_dense(x: torch.Tensor, weight: object) -> bool:
    """Whether overweave multiplies these: a matrix of the dtype of x, not quantized and not packed."""
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.dtype == x.dtype and x.dtype in DTYPES


def obstacle_of(weight: Any) -> str:
    """Why overweave multiplies by no such weight, whatever x is; empty: it does. weight: a tensor, or a DTensor."""
    part = getattr(weight, "_local_tensor", weight)
    if part.__class__ not in PLAIN:
        return f"its weight is a {type(part).__name__}"
    return "" if part.dtype in DTYPES else f"its weight is {part.dtype}"

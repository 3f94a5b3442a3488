"""Replaces the forward of another package's class, for its existing and its future instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from overweave.compat.torch_names import AsyncCollectiveTensor
from overweave.errors import InputError
from overweave.ops.call.operands import DTYPES

PLAIN = (torch.Tensor, nn.Parameter, AsyncCollectiveTensor)
Forward = Callable[..., Any]


class ReplacedForward:
    """The forward of one class. original: that of its package."""

    def __init__(self, owner: type[nn.Module], forward: Forward) -> None:
        self.original: Forward = owner.forward
        self._owner, self._forward = owner, forward

    def register(self) -> None:
        """Replace the forward by overweave's. Raises InputError if it was replaced already, by overweave or another."""
        self._check(self.original, "register", "Call register() once, before others replace it")
        self._owner.forward = self._forward

    def unregister(self) -> None:
        """Restore the original forward. Raises InputError if overweave's is not in place."""
        self._check(self._forward, "unregister", "Take back what was put over it, or call register() first")
        self._owner.forward = self.original

    @property
    def is_registered(self) -> bool:
        """Whether overweave's forward is in place."""
        return self._owner.forward is self._forward

    def _check(self, expected: Forward, asked: str, cure: str) -> None:
        """Raise InputError unless the class has the expected forward."""
        current = self._owner.forward
        if current is not expected:
            where = f"{self._owner.__name__}.forward is {current.__module__}.{current.__qualname__}"
            raise InputError(f"{asked} with {self._owner.__module__}", where, cure)


def is_dense(x: torch.Tensor, weight: object) -> bool:
    """Whether overweave multiplies x by this weight: a matrix of the dtype of x, neither quantized nor packed."""
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.dtype == x.dtype and x.dtype in DTYPES


def obstacle_of(weight: Any) -> str:
    """Why overweave multiplies by no such weight, whatever x is; empty: it does. weight: a tensor, or a DTensor."""
    part = getattr(weight, "_local_tensor", weight)
    if part.__class__ not in PLAIN:
        return f"its weight is a {type(part).__name__}"
    return "" if part.dtype in DTYPES else f"its weight is {part.dtype}"

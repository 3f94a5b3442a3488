"""The packages that adapters support: tested versions, errors for others, and classes whose forward is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import nn

from overweave.compat.torch_names import AsyncCollectiveTensor
from overweave.compat.versions import numbers
from overweave.errors import InputError, MachineError
from overweave.ops.call.operands import DTYPES


class Versions(NamedTuple):
    """The tested versions of a package. package: its name on PyPI. first, last: oldest and newest minor version."""

    package: str
    first: str
    last: str

    @property
    def wanted(self) -> str:
        """The pip requirement."""
        major, minor = self.last.split(".")
        return f"{self.package}>={self.first},<{major}.{int(minor) + 1}"

    def __str__(self) -> str:
        newer = "" if self.first == self.last else f" to {self.last}"
        return f"{self.package} {self.first}{newer}"


# `make adapters-test` runs the newest and the oldest of each.
ADAPTED = {
    "transformers": Versions("transformers", "5.17", "5.24"),
    "megatron": Versions("megatron-core", "0.15", "0.19"),
    "torchtitan": Versions("torchtitan", "0.3", "0.3"),
    "vllm": Versions("vllm", "0.33", "0.33"),
    "deepspeed": Versions("deepspeed", "0.19", "0.19"),
}


@contextmanager
def names_of(adapter: str) -> Iterator[None]:
    """Enter a context in which an adapter imports from its package; versions newer than tested are tried, too.

    Raises MachineError, with the tested versions, if the package is missing, too old, or lacks a name.
    """
    versions = ADAPTED[adapter]
    asked, cure = f"load overweave.adapters.{adapter}", f"It works with {versions}: pip install '{versions.wanted}'"
    try:
        installed = version(versions.package)
    except PackageNotFoundError:
        raise MachineError(asked, f"{versions.package} is not installed", cure) from None
    if numbers(installed) < numbers(versions.first):
        raise MachineError(asked, f"{versions.package} {installed} is too old", cure)
    try:
        yield
    except (ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise MachineError(asked, f"{versions.package} {installed} has other names: {reason}", cure) from error


PLAIN = (torch.Tensor, nn.Parameter, AsyncCollectiveTensor)
Forward = Callable[..., Any]


class ReplacedForward:
    """Replaces the forward of one class by overweave's, and restores it. original: the forward before."""

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
    """Return why overweave does not support a weight, whatever x is; empty if it does. weight: a tensor or DTensor."""
    part = getattr(weight, "_local_tensor", weight)
    if part.__class__ not in PLAIN:
        return f"its weight is a {type(part).__name__}"
    return "" if part.dtype in DTYPES else f"its weight is {part.dtype}"

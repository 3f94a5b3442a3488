"""The tested versions of the packages that adapters adapt, and the errors for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from overweave.compat.versions import numbers
from overweave.errors import MachineError


class Versions(NamedTuple):
    """package: its name on an index. first, last: the oldest and the newest minor version that was tested."""

    package: str
    first: str
    last: str

    @property
    def wanted(self) -> str:
        """The requirement for pip."""
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
    """A context in which an adapter imports names of its package; a newer version than tested may still have them.

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

"""Which versions of the packages that adapters adapt were tested, and what is said of any other."""

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
        """As pip takes it."""
        major, minor = self.last.split(".")
        return f"{self.package}>={self.first},<{major}.{int(minor) + 1}"

    def __str__(self) -> str:
        newer = "" if self.first == self.last else f" to {self.last}"
        return f"{self.package} {self.first}{newer}"


# `make adapters-test` runs the newest of each, and the oldest where it is another.
ADAPTED = {
    "transformers": Versions("transformers", "5.17", "5.24"),
    "megatron": Versions("megatron-core", "0.15", "0.19"),
    "torchtitan": Versions("torchtitan", "0.3", "0.3"),
    "vllm": Versions("vllm", "0.33", "0.33"),
    "deepspeed": Versions("deepspeed", "0.19", "0.19"),
}


@contextmanager
def names_of(adapter: str) -> Iterator[None]:
    """Names of an adapter's package are imported and read inside: of a newer one than was tested, as long as they are
    there. Raises MachineError, which says what works, where the package is missing, too old, or has other names.
    """
    versions = ADAPTED[adapter]
    asked, cure = f"load overweave.adapters.{adapter}", f"It works with {versions}: pip install '{versions.wanted}'"
    try:
        found = version(versions.package)
    except PackageNotFoundError:
        raise MachineError(asked, f"{versions.package} is not installed", cure) from None
    if numbers(found) < numbers(versions.first):
        raise MachineError(asked, f"{versions.package} {found} is too old", cure)
    try:
        yield
    except (ImportError, AttributeError) as error:
        what = " ".join(str(error).split())[:300]
        raise MachineError(asked, f"{versions.package} {found} has other names: {what}", cure) from error

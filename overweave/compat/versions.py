"""With which versions of Triton and of PyTorch overweave is tested. Nothing else in the library asks for a version."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Literal, NamedTuple

from overweave.errors import KernelUnavailable, MachineError

# The oldest and the newest version that tests run with: `python -m campaigns.versions` prints which of them.
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {"torch": ((2, 10), (2, 15)), "triton": ((3, 6), (3, 9))}


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 15) of `2.15.0+cu132`."""
    found = [int(each) for each in re.findall(r"\d+", version.split("+")[0])[:2]]
    return (*found, 0, 0)[:2]  # type: ignore[return-value]


def standing(package: str, version: str) -> Literal["old", "tested", "new"]:
    """Whether a version is one that tests run with, or older or newer than all of them."""
    oldest, newest = TESTED[package]
    return "old" if numbers(version) < oldest else "new" if numbers(version) > newest else "tested"


def tested(package: str) -> str:
    """The versions that tests run with, as a sentence has them: `3.6 to 3.9`."""
    return " to ".join(f"{major}.{minor}" for major, minor in TESTED[package])


@cache
def installed(package: str) -> str:
    """Return the version of an installed package, read once a process; `not installed` if there is none."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return "not installed"
    # `metadata.version` parses the whole file as an e-mail: for Triton's that is over a tenth of the Python calls of a
    # whole first call of ours.
    line = re.search(r"^Version: *(\S+)", found.read_text("METADATA") or "", re.MULTILINE)
    return line.group(1) if line else found.version


_ERRORS = {"torch": MachineError, "triton": KernelUnavailable}


class Home(NamedTuple):
    """Where a name stands in some versions. path: within the module; empty where the module itself is meant."""

    versions: str
    module: str
    path: str


Names = Mapping[str, tuple[Home, ...]]  # the first home that the package at hand has is taken


def first_found(names: Names, name: str, package: str, version: str) -> Any:
    """A listed name where the package at hand has it.

    Raises AttributeError if it is not listed, and if it stands in none of its homes KernelUnavailable of Triton, with
    which a call goes on without kernels, and MachineError of torch.
    """
    if name not in names:
        raise AttributeError(name)
    found = find(names[name])
    if found is None:
        homes = ", ".join(f"{'.'.join(filter(None, home[1:]))} ({home.versions})" for home in names[name])
        called = package.capitalize() if package == "triton" else package
        raise _ERRORS[package](f"use {called}'s {name}", f"{called} {version} has none of {homes}", cure_of(package))
    return found


def find(homes: Iterable[Home]) -> Any:
    """What stands in the first home that there is, or None."""
    for home in homes:
        try:
            return reduce(getattr, filter(None, home.path.split(".")), import_module(home.module))
        except (ImportError, AttributeError):
            continue
    return None


def cure_of(package: str) -> str:
    """What to do about a version that lacks a name."""
    return f"Use a {package.capitalize() if package == 'triton' else package} from {tested(package)}"

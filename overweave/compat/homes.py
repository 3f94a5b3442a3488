"""Names of a package that stand elsewhere in other versions, or in none: where each is looked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

from overweave.compat.versions import tested
from overweave.errors import KernelUnavailable, MachineError

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

"""Triton's private names stand in one file, and each is there in the Triton at hand; nobody else asks for a version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from overweave.compat import triton_names, versions
from overweave.compat.versions import TESTED, Home, numbers, standing
from overweave.errors import KernelUnavailable
from tests.source_tree import ROOT, nodes

PRODUCT = sorted((ROOT / "overweave").rglob("*.py"))
COMPAT = ROOT / "overweave" / "compat"
# What reports a version, and decides nothing by it.
TELLS = (
    "adapters/symm_mem/install.py",
    "cli/main.py",
    "runtime/diagnosis.py",
    "tuner/calibrate/machine_file.py",
    "tuner/store/cache.py",
)
# Modules of Triton whose names are nobody's promise; the interpreter's are repaired in rooms of their own.
PRIVATE = (
    "triton.backends",
    "triton.compiler",
    "triton.runtime.jit",
    "triton._C",
    "triton.experimental.gluon._runtime",
)


def modules_named(path: Path) -> Iterator[str]:
    """What a file imports, `from a import b` as `a.b`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def outside(paths: list[Path]) -> list[Path]:
    return [path for path in paths if COMPAT not in path.parents]


def test_private_modules_of_triton_are_imported_in_one_file() -> None:
    found = {str(path.relative_to(ROOT)): name for path in outside(PRODUCT) for name in modules_named(path)
             if name.startswith(PRIVATE)}  # fmt: skip
    assert not found


def test_names_that_move_are_spelled_in_one_file() -> None:
    moving = {home.path.split(".")[-1] for homes in triton_names.NAMES.values() if len(homes) > 1 for home in homes}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in outside(PRODUCT)
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in moving and ast.unparse(node.value) in ("gl", "tma", "tiles")
    ]
    assert len(moving) > 5
    assert not found


def test_nothing_else_asks_for_a_version() -> None:
    found = {
        str(path.relative_to(ROOT / "overweave"))
        for path in outside(PRODUCT)
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "__version__" and ast.unparse(node.value) != "overweave"
    }
    assert found <= set(TELLS)


@pytest.mark.parametrize("name", triton_names.NAMES)
def test_every_name_is_there(name: str) -> None:
    assert getattr(triton_names, name) is not None


def test_a_name_that_is_nowhere_is_said_with_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = (Home("3.6 on", "triton.language", "nowhere"),)
    monkeypatch.setitem(triton_names.NAMES, "gone", homes)
    with pytest.raises(KernelUnavailable, match=r"none of triton\.language\.nowhere \(3\.6 on\)\. Use a Triton from"):
        _ = triton_names.gone


@pytest.mark.parametrize("package", ["torch", "numpy", "overweave"])
def test_versions_of_packages_are_those_of_their_metadata(package: str) -> None:
    assert versions.installed(package) == metadata.version(package)
    assert versions.installed("no_such_package") == "not installed"


def test_versions_are_compared_by_their_first_two_numbers() -> None:
    assert numbers("2.15.0+cu132") == (2, 15)
    assert numbers("3.10.0") > numbers("3.9.0")
    assert [standing("triton", each) for each in ("3.5.1", "3.6.0", "3.9.1", "3.10.0")] == [
        "old",
        "tested",
        "tested",
        "new",
    ]
    assert versions.tested("torch") == "{}.{} to {}.{}".format(*TESTED["torch"][0], *TESTED["torch"][1])

"""Which versions of packages the adapters take, and the one line that is said of another."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest

from overweave.adapters import packages
from overweave.adapters.packages import ADAPTED, names_of
from overweave.errors import MachineError
from tests.source_tree import ROOT, modules


@pytest.mark.parametrize("name", ADAPTED)
def test_one_that_is_older_or_missing_is_named_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch):
    wanted = ADAPTED[name]
    monkeypatch.setattr(packages, "version", lambda package: "0.0.9")
    with pytest.raises(MachineError) as raised, names_of(name):
        pass
    told = str(raised.value)
    assert told.count("\n") == 0
    assert f"{wanted.package} 0.0.9 is too old" in told
    assert f"It works with {wanted}: pip install '{wanted.package}>={wanted.first},<" in told

    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(packages, "version", missing)
    with pytest.raises(MachineError, match=f"{wanted.package} is not installed.*pip install"), names_of(name):
        pass


@pytest.mark.parametrize("name", ADAPTED)
def test_one_whose_names_have_moved_is_named_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch):
    """Newer ones are such, sooner or later: the package is here an empty one."""
    package = name
    monkeypatch.setattr(packages, "version", lambda package: "99.1.2rc1")
    for loaded in [each for each in sys.modules if each.split(".")[0] in (package, "spmd_types")]:
        monkeypatch.delitem(sys.modules, loaded)
    for empty in (package, "spmd_types"):
        monkeypatch.setitem(sys.modules, empty, ModuleType(empty))
    monkeypatch.delitem(sys.modules, f"overweave.adapters.{name}", raising=False)
    with pytest.raises(MachineError) as raised:
        import_module(f"overweave.adapters.{name}")
    assert str(raised.value).count("\n") == 0
    assert f"{ADAPTED[name].package} 99.1.2rc1 has other names: " in str(raised.value)
    assert str(ADAPTED[name]) in str(raised.value)


def test_between_the_first_and_beyond_the_last_names_decide(monkeypatch: pytest.MonkeyPatch):
    for found in ("5.17.0", "5.24.1", "5.99", "6.0"):
        monkeypatch.setattr(packages, "version", lambda package, found=found: found)
        with names_of("transformers"):
            pass


def test_every_adapter_of_a_package_asks_for_its_version():
    asked = {
        package for path in modules().values() for package in re.findall(r'with names_of\("(\w+)"\)', path.read_text())
    }
    assert asked == set(ADAPTED)


def test_the_oldest_and_the_newest_are_what_is_tested():
    makefile = (ROOT / "Makefile").read_text()
    tested = makefile.partition("\nadapters-test:")[2].partition("\n\n")[0]
    for name, wanted in ADAPTED.items():
        package = re.escape(wanted.package)
        assert re.search(rf"'{package}>={re.escape(wanted.last)},<", tested), name
        assert wanted.first == wanted.last or re.search(rf"'{package}=={re.escape(wanted.first)}\.\*'", tested), name

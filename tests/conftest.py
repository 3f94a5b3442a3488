"""What every test may use: golden files, and the rule by which GPU tests are left out."""

from __future__ import annotations

import gc
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from overweave.errors import MachineError
from overweave.hardware.multicast import require_off, switch_off

GOLDEN = Path(__file__).parent / "golden"
# What somebody measured on this machine must not decide what a test sees; ranks and subprocesses inherit it.
_CACHE = tempfile.TemporaryDirectory(prefix="overweave-tests-")
os.environ["OVERWEAVE_CACHE_DIR"] = _CACHE.name
switch_off(os.environ)  # NVLink multicast: GPUs may be others', too


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is printed now into tests/golden")
    parser.addoption("--part", default="1/1", help="K/N: every N-th of the chosen tests, from the K-th on")


@cache
def gpus() -> int:
    """How many NVIDIA GPUs this machine has; asked of the driver, so that no fast test pays for an import of torch."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.gpu` needs one GPU, `@pytest.mark.gpu(2)` two. Of what is chosen, the part that is asked for."""
    first, every = map(int, config.getoption("--part").split("/"))
    if every > 1:
        items[:] = items[first - 1 :: every]
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if marked and gpus():
        try:
            require_off("run tests on GPUs", os.environ)
        except MachineError as error:
            raise pytest.UsageError(str(error)) from None
    for item, mark in marked:
        needed = mark.args[0] if mark.args else 1
        if gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, found {gpus()}"))


def pytest_collection_finish() -> None:
    """What importing all tests has made stays to the end: no later collection of garbage goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Nor does one go through what earlier tests keep, such as plans that the library remembers."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` fails unless tests/golden/`name` holds `text`; `--update-golden` rewrites the file."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run pytest --update-golden and read what it wrote"
        assert text == path.read_text(), f"{name} differs; if that is meant: pytest --update-golden, and read the diff"

    return check

"""Which versions of torch and Triton run what: launches, a dozen compiled configurations, interpreted kernels, their
arithmetic beside a GPU's, and what torch asks of operators, layers and replaced ops.

    python -m campaigns.versions [--only 2.13:3.6.0 2.10.0:3.6.0 ...] [--numpy NUMPY]

Prints a row for each pair of a torch and a Triton, with what its tests say on a CPU; then what GPUs ran, and CPUs on
other days, from the result files, which name their date. What is not installed is put beside (.ci/triton, .ci/torch);
torch's floor and its roof may be built for CUDA. Exit code 1 if a test failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from campaigns.shown import shown

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results/versions.*.txt"
LIMIT_S, LAST_CHARACTERS = 3600, 120


class NotToBeHad(Exception):
    """A torch or a Triton that cannot be put beside: its row says so."""


class Pair(NamedTuple):
    """Versions that run together: a torch, or an empty text for the one at hand, and a Triton."""

    torch: str
    triton: str

    def __str__(self) -> str:
        return f"{self.torch or torch.__version__.split('+')[0]}:{self.triton}"


# Every Triton beside the torch at hand; torch's floor and roof, each with the Triton that it names.
PAIRS = (
    *(Pair("", version) for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0")),
    Pair("2.10.0", "3.6.0"),
    Pair("2.15.0", "3.9.0"),
)
NUMPY = "numpy==2.4.6"  # the newest, beside torch's roof


class Tests(NamedTuple):
    """A column: what it is called, and the files whose tests it runs, with further words for pytest."""

    called: str
    words: tuple[str, ...]
    is_interpreted: bool = False


COLUMNS = (
    Tests("launches, configurations, names", ("tests/runtime/gpu/test_launcher.py", "tests/compat")),
    Tests(
        "interpreted kernels",
        ("--part=1/18", "tests/runtime/interpreted_kernels.py", "tests/runtime/interpreted_table.py"), True,
    ),
    Tests("their arithmetic", ("tests/runtime/interpreted_bits.py",), True),
    Tests(
        "operators, styles, replaced ops",
        ("-m", "not gpu and not nightly", "tests/ops/dispatch", *(f"tests/torch/test_{name}.py" for name in
         ("install", "pass", "parallel", "opcheck"))),
    ),
)  # fmt: skip


class Row(NamedTuple):
    """What the tests of each column said: `24 passed`, or the end of what went wrong."""

    pair: Pair
    said: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return all("passed" in each and not re.search("failed|error", each) for each in self.said)


def made(kind: str, version: str, *packages: str) -> str:
    """The folder of a torch or a Triton that stands beside, made where it is not there."""
    folder = ROOT / f".{kind}-{version}"
    if not (folder / kind / "__init__.py").exists():
        run = subprocess.run(
            [f".ci/{kind}", version, *packages], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if run.returncode:
            raise NotToBeHad(f"{kind} {version} is not to be had: {run.stderr.strip()[-LAST_CHARACTERS:]}")
    return str(folder)


def environment_of(pair: Pair, numpy: str) -> dict[str, str]:
    """In which a pair is what Python imports."""
    environment, folders = dict(os.environ), []
    if pair.triton != triton.__version__:
        folders.append(made("triton", pair.triton))
    if pair.torch:
        folders.append(made("torch", pair.torch, *([numpy] if pair == PAIRS[-1] else [])))
        environment["LD_LIBRARY_PATH"] = f"{folders[-1]}/stubs"
    paths = [*folders, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    cache = folders[0] if folders else str(ROOT / ".venv")
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": f"{cache}/cache"}


def said_by(tests: Tests, environment: dict[str, str]) -> str:
    """The last line of a run of tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests.words]
    told = environment | ({"TRITON_INTERPRET": "1"} if tests.is_interpreted else {})
    try:
        run = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S} s"
    counts = re.findall(r"^.*\d+ (?:passed|failed|error).*$", run.stdout, re.MULTILINE)
    if not counts:
        return f"exit code {run.returncode}: {run.stderr.strip()[-LAST_CHARACTERS:]}"
    counted = re.findall(r"\d+ (?:passed|failed|error|skipped)", counts[-1])
    return ", ".join(counted)


def row_of(pair: Pair, numpy: str) -> Row:
    try:
        environment = environment_of(pair, numpy)
    except NotToBeHad as error:
        return Row(pair, (str(error),))
    return Row(pair, tuple(said_by(tests, environment) for tests in COLUMNS))


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m campaigns.versions", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TORCH:TRITON", help="pairs to run, of all")
    parser.add_argument("--numpy", default=NUMPY, help="what is put beside torch's roof")
    chosen = parser.parse_args(arguments)
    pairs = [pair for pair in PAIRS if not chosen.only or str(pair) in chosen.only]
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"Python {python}, no GPU used; {chosen.numpy} with torch {PAIRS[-1].torch}")
    print(f"{'torch':<8} {'Triton':<8}", *(f"{tests.called:<34}" for tests in COLUMNS))
    rows = []
    for pair in shown(pairs, "pairs of a torch and a Triton"):
        row = row_of(pair, chosen.numpy)
        rows.append(row)
        print(
            f"{str(row.pair).split(':')[0]:<8} {row.pair.triton:<8}", *(f"{each:<34}" for each in row.said), flush=True
        )
    for path in sorted(ROOT.glob(RESULTS)):
        print(f"\n{path.relative_to(ROOT)}\n{path.read_text().rstrip()}")
    return int(not rows or not all(row.is_right for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Which versions of torch and Triton run what: launches, a dozen compiled configurations, interpreted kernels, and
their arithmetic beside a GPU's.

    python -m campaigns.versions [--triton 3.6.0 3.7.1 3.8.0 3.9.0]

Prints a row for each Triton beside the torch at hand, with what its tests say; then what GPUs ran, with each version,
from the result files, which name their date. A Triton that is not installed is put beside (.ci/triton). Exit code 1 if
a test failed.
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
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
COMPILED = ("tests/runtime/gpu/test_launcher.py", "tests/compat")
INTERPRETED = ("--part=1/9", "tests/runtime/interpreted_kernels.py")
BITS = ("tests/runtime/interpreted_bits.py",)
ON_GPUS = "benchmarks/results/versions.*.txt"
LIMIT_S = 900


class Row(NamedTuple):
    """What one Triton's tests said: `24 passed`, or the end of what went wrong."""

    triton: str
    compiled: str
    interpreted: str
    bits: str

    @property
    def is_right(self) -> bool:
        return all("passed" in each and "failed" not in each for each in (self.compiled, self.interpreted, self.bits))


def place_of(version: str) -> str:
    """The folder of a Triton that stands beside, made where it is not there; none for the one that is installed."""
    if version == triton.__version__:
        return ""
    folder = ROOT / f".triton-{version}"
    if not (folder / "triton" / "__init__.py").exists():
        subprocess.run([".ci/triton", version], cwd=ROOT, check=True, timeout=LIMIT_S)
    return str(folder)


def said(folder: str, words: tuple[str, ...], told: dict[str, str]) -> str:
    """The last line of a run of tests with the Triton of a folder."""
    paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))] if folder else None
    environment = {**os.environ, **told} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
    environment["TRITON_CACHE_DIR"] = f"{folder or ROOT / '.venv'}/cache"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    counts = re.findall(r"^.*\d+ (?:passed|failed|error).*$", run.stdout, re.MULTILINE)
    return (
        counts[-1].split(" in ")[0].strip("= ")
        if counts
        else f"exit code {run.returncode}: {run.stderr.strip()[-120:]}"
    )


def row_of(version: str) -> Row:
    folder = place_of(version)
    interprets = {"TRITON_INTERPRET": "1"}
    return Row(version, said(folder, COMPILED, {}), *(said(folder, words, interprets) for words in (INTERPRETED, BITS)))


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m campaigns.versions", description=__doc__)
    parser.add_argument("--triton", nargs="+", default=VERSIONS, help="versions to run")
    rows = [row_of(each) for each in shown(parser.parse_args(arguments).triton, "versions of Triton")]
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"Python {python}, torch {torch.__version__}, no GPU used")
    print(f"{'Triton':<8} {'launches and configurations':<34} {'interpreted kernels':<34} their arithmetic")
    for row in rows:
        print(f"{row.triton:<8} {row.compiled:<34} {row.interpreted:<34} {row.bits}")
    for path in sorted(ROOT.glob(ON_GPUS)):
        print(f"\n{path.relative_to(ROOT)}\n{path.read_text().rstrip()}")
    return int(not all(row.is_right for row in rows))


if __name__ == "__main__":
    sys.exit(main())

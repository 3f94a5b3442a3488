"""Which plans, predicted times and PTX a checkout makes, as digests: a change of words or of folders leaves them alone.

    python -m campaigns.lock [--write] [--ptx]

Each method of the package has three digests: of its plans in the sizes that `make test` builds, of its plans in all
sizes, and of its predicted times. --ptx: also the PTX of shipped kernels, as the Triton at hand compiles it, which
takes minutes. --write: the digests of this checkout replace those of the file. Exit code 1 if one differs: a change
that means it writes the file anew and says what changed, and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.verdict import Verdict, tell
from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.operators.registry import record_of
from overweave.ir.pause_gc import without_collection
from overweave.ir.problem import Problem
from overweave.ir.text.files import to_json
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.record import Method, SettingValue, combinations
from overweave.sim.simulate import total_us

FILE = Path(__file__).with_name("lock.json")
N, K = 192, 128
Digests = dict[str, dict[str, str]]


class Sizes(NamedTuple):
    """Of the problems whose plans are digested."""

    world_sizes: tuple[int, ...]
    rows: tuple[int, ...]
    forms: tuple[Mapping[str, Any], ...]


PLAIN: dict[str, Any] = {"dtype": "bfloat16"}
SCALED = {"dtype": "float8_e4m3fn", "b_is_transposed": True, "out_dtype": "bfloat16"}
FORMS: tuple[dict[str, Any], ...] = (
    PLAIN,
    {"dtype": "float32"},
    PLAIN | {"epilogue": Epilogue(bias=True, activation="silu", residual=True)},
    PLAIN | {"epilogue": Epilogue(gate=True, activation="gelu")},
    PLAIN | {"norm": Norm(eps=1e-5, residual=True)},
    PLAIN | {"columns": (N // 2, N // 4, N // 4)},
    SCALED | {"epilogue": Epilogue(scaling="tensor")},
    SCALED | {"epilogue": Epilogue(scaling="rows", bias=True)},
    PLAIN | {"counted": True},
    PLAIN | {"returns_gathered": True},
)
BY_DAY = Sizes((1, 2, 4), (37,), FORMS)
WHOLE = Sizes(tuple(range(1, 9)), (0, 3, 37, 64, 4096), FORMS)
TIMED = (("h200x4", 4), ("h100x8", 8), ("a100_pciex8", 8))
TIMED_SHAPES = ((2048, 1024, 4096), (8192, 3584, 1024))
PTX_KERNELS, PTX_OF_EACH = 20, 3


def options_of(method: Method) -> Iterator[dict[str, SettingValue]]:
    """All that the tuner tries of a method; of one that it does not try, what the method does by itself."""
    for grid in method.grids or ({},):
        yield from combinations(grid)


def plans(method: Method, sizes: Sizes) -> Iterator[bytes]:
    """Every plan of a method; of a problem that it refuses, the fact."""
    for world_size, m, form in product(*sizes):
        rows = record_of(method.operator).whole_rows(m, world_size)
        problem = Problem(operator=method.operator, m=rows, n=N, k=K, world_size=world_size, **form)
        for options in options_of(method):
            yield _plan(method, problem, options)


def _plan(method: Method, problem: Problem, options: Mapping[str, SettingValue]) -> bytes:
    try:
        return to_json(build(method.full_name, problem, options))
    except InputError:
        return b"refused"


def times(method: Method) -> Iterator[bytes]:
    """The predicted times of a method, in whole nanoseconds, each with the options that it names first."""
    for (name, world_size), (m, n, k) in product(TIMED, TIMED_SHAPES):
        problem = Problem(operator=method.operator, m=m, n=n, k=k, world_size=world_size, dtype="bfloat16")
        try:
            us = total_us(build(method.full_name, problem, next(options_of(method))), load(name))
        except InputError:
            yield b"refused"
        else:
            yield str(round(us * 1000)).encode()


def ptx() -> dict[str, str]:
    """Of shipped kernels, without what names lines of files."""
    import triton

    from campaigns.lint.lint_cases import cases
    from tools.aot import compile_kernel

    triton.knobs.compilation.disable_line_info = True
    taken: dict[str, int] = {}
    digests: dict[str, str] = {}
    for case in cases():
        kernel = case.source.name
        taken[kernel] = taken.get(kernel, 0) + 1
        if taken[kernel] <= PTX_OF_EACH and len(digests) < PTX_KERNELS:
            text = re.sub(r"(?m)^\s*(//.*)?\n", "", compile_kernel(case.source).ptx)
            digests[f"{kernel} {case.source.config}".strip()] = digest([text.encode()])
    return digests


def digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part + b"\n")
    return whole.hexdigest()[:16]


def by_day() -> dict[str, str]:
    """What `make test` compares: the plans of every method in few sizes."""
    with without_collection():
        return {name: digest(plans(method, BY_DAY)) for name, method in METHODS.items()}


def computed(with_ptx: bool) -> Digests:
    """All digests of this checkout, by what they are of."""
    day = by_day()
    with without_collection():
        whole = {name: digest(plans(method, WHOLE)) for name, method in METHODS.items()}
        timed = {name: digest(times(method)) for name, method in METHODS.items()}
    found = {"plans by day": day, "plans": whole, "predicted times": timed}
    if with_ptx:
        import triton

        found[f"PTX of Triton {triton.__version__}"] = ptx()
    return found


def kept() -> Digests:
    """The digests of the file."""
    digests: Digests = json.loads(FILE.read_text())
    return digests


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What has another digest, or none in one of both."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def verdicts(old: Digests, new: Digests) -> Iterator[Verdict]:
    for kind, digests in new.items():
        changed = differing(old.get(kind, {}), digests)
        few = ", ".join(islice(changed, 5)) + (", ..." if len(changed) > 5 else "")
        found = f"{len(changed)} of {len(digests)} differ" + (f": {few}" if changed else "")
        yield Verdict(f"{kind} as locked", found, not changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--ptx", action="store_true")
    asked = parser.parse_args()
    old, new = kept(), computed(asked.ptx)
    status = tell(verdicts(old, new))
    if not asked.write:
        return status
    FILE.write_text(json.dumps(old | new, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a compilation takes before Triton is asked: a text read, a plan made and proven, the new text written.

    python -m campaigns.compile_times [--csv FILE]

No GPU is needed. Every annotated kernel of the examples, with every exchange that the lint looks at. Ends with 1 if one
took a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from campaigns.lint.authored_cases import AUTHORS, KERNELS, WORLD_SIZE, Author
from campaigns.tables.table_rows import Row, show, verdicts, write
from overweave.compiler.emit.emit import emit, load_generated
from overweave.compiler.emit.fuse import fusion_options
from overweave.ops.author.compile import compile

REPEATS = 3


def compile_rows() -> Iterator[Row]:
    """The median of a few, each from the start."""
    compiled_us("matmul", AUTHORS["matmul"], AUTHORS["matmul"].exchanges[0])  # what is imported, and read once
    for file, author in AUTHORS.items():
        for exchanges in author.exchanges:
            times = sorted(compiled_us(file, author, exchanges) for _ in range(REPEATS))
            words = " ".join(f"{tensor}={how}" for tensor, how in exchanges.items())
            yield Row("compile", "", "", file, words, "", times[REPEATS // 2], times[-1], 0.0)


def compiled_us(file: str, author: Author, exchanges: Mapping[str, str]) -> float:
    """Microseconds from the kernel's file to the function that a launch gives to Triton."""
    constants = {name: value for name, value in author.constants.items() if type(value) is int}
    numbers = {**author.numbers, **constants}
    with TemporaryDirectory() as folder:
        started_ns = time.perf_counter_ns()
        fused = compile(f"{KERNELS / file}.py:{author.name}", exchanges)
        plan = fused.plan(numbers, WORLD_SIZE, rank=0)
        text = emit(fused.kernel, fusion_options(plan, fused.kernel.space(numbers), fused.schedules))
        load_generated(Path(folder), author.name, text)
        return (time.perf_counter_ns() - started_ns) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.lint.compile_times", description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="keep the rows there")
    asked = parser.parse_args()
    rows = list(compile_rows())
    if asked.csv:
        write(asked.csv, rows)
    print(show(rows))
    found = verdicts(rows)
    print(*found, sep="\n", flush=True)
    sys.exit(int(not all(verdict.holds for verdict in found)))


if __name__ == "__main__":
    main()

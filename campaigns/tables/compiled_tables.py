"""Compiled matmuls measured: against plans by hand and torch, and the tables that a tuner chooses from.

    torchrun --standalone --nproc-per-node 2 -m campaigns.compiled_tables --csv FILE
    python -m campaigns.compiled_tables --show FILE

against     the cases of mlp, compiled beside the portable kernel of ours, torch's fused operators and the library
backends    back end x pieces x SMs that communicate          tiles     tile shape x stages x order
streamed    one kernel for all chunks, or a matmul per chunk  tuner     what it chose, beside the best of the tables
compile     what a compilation takes without Triton

All methods of a unit are interleaved by the one timer, ranks aligned, and the slowest rank counts. FILE keeps what it
held of other parts; it is written after every unit. `--parts against tiles`: these alone. Behind `--seconds` no unit is
begun. Ends with a verdict per
promise, and with 1 if one of them failed.
SOURCE: AutoOverlap, Figures 2b and 11.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from campaigns.gpu_ranks import join
from campaigns.lint.compile_times import compile_rows
from campaigns.tables.compiled_parts import (
    CANDIDATES,
    GATHER,
    SCATTER,
    STUDIED,
    Part,
    Scope,
    against,
    backend_table,
    stream_table,
    tile_table,
    tuner_choice,
)
from campaigns.tables.table_rows import Row, merged, read, show, verdicts, write
from overweave.memory.group import Group, resolve
from overweave.tuner.space.shapes import ShapeCase, read_shapes


def compile_times(scope: Scope, known: Sequence[Row]) -> Iterator[list[Row]]:
    """On every rank at once, as calls compile."""
    yield list(compile_rows())


PARTS: dict[str, Part] = {
    "against": against,
    "backends": backend_table,
    "tiles": tile_table,
    "tuner": tuner_choice,
    "streamed": stream_table,
    "compile": compile_times,
}
DEADLINE = timedelta(seconds=45)  # of whatever waits for a peer: a call that stands still is told, and ends
Keep = Callable[[list[Row]], None]


def scope_of(group: Group, shapes: str) -> Scope:
    """The set of shapes on the GPUs of this group."""
    cases = {operator: read_shapes(shapes, operator).cases for operator in (GATHER, SCATTER)}
    studied = {operator: _studied(own) for operator, own in cases.items()}
    device = torch.device("cuda", torch.cuda.current_device())
    return Scope(group, device, cases, studied, CANDIDATES)


def _studied(cases: tuple[ShapeCase, ...]) -> ShapeCase:
    return next((case for case in cases if case.name == STUDIED), cases[0])


def measure(parts: Sequence[str], scope: Scope, known: list[Row], seconds: float, keep: Keep) -> list[Row]:
    """Runs the parts one unit after the other while time is left; all rows, old and new. Collective."""
    started, found = time.monotonic(), list[Row]()
    for part in parts:
        for unit in PARTS[part](scope, merged(known, found)):
            found += unit
            keep(merged(known, found))
            spent = _spent(started, scope)
            if scope.group.rank == 0:
                print(f"{part}: {len(unit)} rows, {spent:.0f} s", flush=True)
            if spent > seconds:
                break
        if _spent(started, scope) > seconds:
            print(f"{part} and what follows it: no time is left", flush=True)
            break
    return merged(known, found)


def _spent(started: float, scope: Scope) -> float:
    """Seconds on the rank that has spent most."""
    spent = torch.tensor([time.monotonic() - started], dtype=torch.float64, device=scope.device)
    dist.all_reduce(spent, dist.ReduceOp.MAX, scope.group.process_group)
    return float(spent)


def tell(rows: Sequence[Row]) -> int:
    """Prints the tables and the verdicts; 1 if one of these failed."""
    print(show(rows))
    found = verdicts(rows)
    print(*found, sep="\n", flush=True)
    return int(not all(verdict.holds for verdict in found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.tables.compiled_tables", description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="keep the rows there")
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--seconds", type=float, default=220.0, help="begin no unit of work behind that")
    parser.add_argument("--shapes", default="mlp", help="a set of shapes of both operators")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: print a file, and judge it")
    asked = parser.parse_args()
    if asked.show:
        sys.exit(tell(read(asked.show)))
    known = read(asked.csv) if asked.csv and asked.csv.is_file() else []
    join(DEADLINE)
    group = resolve(None)

    def keep(rows: list[Row]) -> None:
        if asked.csv and group.rank == 0:
            write(asked.csv, rows)

    rows = measure(asked.parts, scope_of(group, asked.shapes), known, asked.seconds, keep)
    code = tell(rows) if group.rank == 0 else 0
    dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()

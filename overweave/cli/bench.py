"""`overweave bench`: an operator beside the library, torch's fused op and the roofs, on every rank of one host.

Without torchrun's variables in the environment it starts its own ranks through torchrun, once per whole run; with
them it is one of the ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from overweave.cli.bench_table import print_runs
from overweave.cli.ranks import Device, how_many, warn_of_hours
from overweave.errors import InputError, MachineError
from overweave.ops.operators import OPERATORS, operator_for
from overweave.ops.plan_words import candidate_of
from overweave.tuner.baselines import OURS
from overweave.tuner.bench import NO_MULTICAST, Request, Run, device_count, joined_world, run
from overweave.tuner.shapes import DtypeWord, read_shapes
from overweave.tuner.summary import Spread, middle, spread


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` holds. runs: every whole run. middle: the one to quote. spread: how its numbers moved."""

    command: str
    shapes_source: str
    runs: tuple[Run, ...]
    middle: int
    spread: dict[str, dict[str, Spread]]


def bench(
    operator: Annotated[str, typer.Argument(metavar="OP", help=" or ".join(OPERATORS))],
    shapes: Annotated[str, typer.Option(help="A file, or a set of benchmarks/shapes such as mlp")] = "mlp",
    world: Annotated[int, typer.Option("--world", "-w", min=0, max=32, help="0: every GPU, or 4 emulated ranks")] = 0,
    device: Annotated[Device, typer.Option(help="auto: GPUs where there is one")] = "auto",
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    plan: Annotated[list[str] | None, typer.Option(help="Time these plans in place of our choice")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Whole runs; the middle one is shown, with the spread")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file")] = None,
) -> None:
    """Compare an operator with the library, torch's fused op and the roofs, side by side in one run."""
    if operator not in OPERATORS:
        raise InputError(f"bench {operator[:60]}", "there is no such operator", f"Choose one of {', '.join(OPERATORS)}")
    shape_set = read_shapes(shapes, operator)
    for words in plan or ():
        candidate_of(operator, words)
    where = device if device != "auto" else "cuda" if device_count() else "cpu"
    warn_of_hours(where, shape_set.cases)
    request = Request(operator=operator, cases=shape_set.cases, device=where, dtype=dtype, plans=tuple(plan or ()))
    if "RANK" in os.environ:
        runs: tuple[Run, ...] = (run_as_rank(request),)
        if os.environ["RANK"] != "0":
            return
    else:
        ranks = how_many(where, world)
        runs = tuple(run_on_own_ranks(request, ranks) for _ in range(repeat))
    chosen = middle(runs, OURS)
    report = Report(
        command=f"overweave {' '.join(without_destination(sys.argv[1:]))}",
        shapes_source=shape_set.source,
        runs=runs,
        middle=chosen,
        spread=spread(runs, chosen),
    )
    if json is not None:
        _write(json, report)
    print_runs(runs, chosen, report.spread)


def _write(path: Path, report: Report) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise InputError(f"write {path}", str(error), "Name a file that can be written") from None


def run_as_rank(request: Request) -> Run:
    """This process's part of one whole run; rank 0 draws the progress bar."""
    percentage = TextColumn("{task.percentage:>3.0f} %")
    columns = (TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
    first = os.environ["RANK"] == "0"
    done = {case.name: index for index, case in enumerate(request.cases)}
    with (
        joined_world(request.device) as group,
        Progress(*columns, console=Console(stderr=True), transient=True, disable=not first) as progress,
    ):
        task = progress.add_task(request.operator, total=len(request.cases))

        def on_progress(case: str, part: float) -> None:
            progress.update(task, completed=done[case] + part, description=f"{request.operator} {case}")

        return run(request, group, OPERATORS, on_progress, operator_for)


def without_destination(words: list[str]) -> list[str]:
    """A command line without `--json FILE`: what to repeat, not where this machine kept the numbers."""
    kept = [word for word, before in zip(words, ["", *words], strict=False) if "--json" not in (word, before)]
    return [word for word in kept if not word.startswith("--json=")]


def run_on_own_ranks(request: Request, world_size: int) -> Run:
    """One whole run in fresh processes: nothing is warm from the last one. Raises MachineError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        shapes, result = Path(folder, "shapes.json"), Path(folder, "run.json")
        shapes.write_bytes(msgspec.json.encode({"cases": request.cases}))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
            "-m", "overweave.cli.main", "bench", request.operator, f"--shapes={shapes}", f"--json={result}",
            f"--device={request.device}", f"--dtype={request.dtype}", *(f"--plan={plan}" for plan in request.plans),
        ]  # fmt: skip
        threads = max(1, (os.cpu_count() or 1) // world_size)
        environment = {**os.environ, **NO_MULTICAST, "OMP_NUM_THREADS": str(threads)}
        ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if ended.returncode or not result.exists():
            raise MachineError("bench", f"a rank ended with {ended.returncode}", "Read what it printed above")
        return msgspec.json.decode(result.read_bytes(), type=Report).runs[0]

"""`overweave bench`: an operator beside the library, torch's fused op and the roofs, on every rank of one host.

Without torchrun's variables in the environment it starts its own ranks through torchrun, once per whole run; with
them it is one of the ranks.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from msgspec.structs import replace

from overweave.block.cases import BLOCK, read_blocks
from overweave.cli.bench_file import BenchReport, read_report, report_of, write_report
from overweave.cli.bench_table import print_runs
from overweave.cli.destination import check_file
from overweave.cli.progress import OnPart, progress
from overweave.cli.ranks import DeviceChoice, how_many, is_one_of_the_ranks, start_ranks, warn_of_hours, where
from overweave.errors import InputError, MachineError
from overweave.hardware import multicast
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.memory.group import Group
from overweave.ops.call.plan_words import candidate_of
from overweave.ops.operators import operator_for
from overweave.tuner.measure.bench import BenchRequest, BenchRun, join_world, runs
from overweave.tuner.space.shapes import DtypeWord, ShapeCase, read_shapes, usual_set

NO_MULTICAST_HELP = "The ranks use no NVLink multicast; so it is wherever the environment says so of one library"
TURN = "OVERWEAVE_BENCH_TURN"  # which whole run a rank that we started is part of, from 1


def bench(
    operator: Annotated[str, typer.Argument(metavar="OP", help=f"{', '.join(OPERATORS)}, or block: of a transformer")],
    shapes: Annotated[str, typer.Option(help="A file or set of benchmarks/shapes; else mlp, moe or llama")] = "",
    world: Annotated[int, typer.Option("--world", "-w", min=0, max=32, help="0: every GPU, or 4 emulated ranks")] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs where there is one")] = "auto",
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    plan: Annotated[list[str] | None, typer.Option(help="Time these plans in place of our choice")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Whole runs; the middle one is shown, with the spread")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file, case by case")] = None,
    simulate: Annotated[str | None, typer.Option(help="Of a block: predict it on this machine, without ranks")] = None,
    no_multicast: Annotated[bool, typer.Option("--no-multicast", help=NO_MULTICAST_HELP)] = False,
) -> None:
    """Compare an operator, or a block, with the library and what torch fuses, side by side in one run."""
    if simulate is not None:
        from overweave.cli.predicted_blocks import predict_blocks  # which imports torch's compiler

        predict_blocks(operator, shapes, (simulate, world), json)
        return
    place = where(device, least=1)
    ranks = how_many(place, world)
    named = shapes or ("llama" if operator == BLOCK else usual_set(operator))
    # What cannot be is refused before any rank is started.
    if operator == BLOCK:
        subject = _of_blocks(named, ranks, (place, dtype), plan or ())
    else:
        subject = _of_operator(
            named, ranks, BenchRequest(operator=operator, device=place, dtype=dtype, plans=tuple(plan or ()))
        )
    warn_of_hours(place, subject.cases)
    if json is not None:
        check_file(json)
    turn = int(os.environ.get(TURN, 0))
    asked = ["bench", operator, f"--shapes={named}", f"--world={ranks}", f"--device={place}", f"--dtype={dtype}"]
    asked += [*(f"--plan={each}" for each in plan or ()), *([f"--repeat={repeat}"] if repeat > 1 else ())]
    if not is_one_of_the_ranks():
        report = run_on_own_ranks(asked, ranks, repeat, json, dict(multicast.WITHOUT) if no_multicast else {})
    elif repeat > 1 and not turn:
        raise InputError(f"bench --repeat {repeat}", "torchrun started this process", "Start it without torchrun")
    else:
        earlier = read_report(json).runs[: turn - 1] if json is not None and turn > 1 else ()
        command = shlex.join(["overweave", *asked])
        report = _run_as_rank(place, subject, lambda run: report_of(command, subject, repeat, (*earlier, run)), json)
        if turn or os.environ["RANK"] != "0":
            return  # another process tells
    print_runs(report.runs, report.middle, report.spread)


class _Subject(NamedTuple):
    """What is compared: its cases, as matmuls, where they come from, and how a rank of a group runs it."""

    name: str
    source: str
    cases: tuple[ShapeCase, ...]
    runs: Callable[[Group, OnPart], Iterator[BenchRun]]


def _of_operator(shapes: str, ranks: int, request: BenchRequest) -> _Subject:
    """An operator on a shape set. Raises InputError."""
    operator = operator_of(request.operator, "bench").name
    shape_set = read_shapes(shapes, operator)
    for case in shape_set.cases:
        case.problem(operator, ranks, request.dtype)
    for words in request.plans:
        candidate_of(operator, words)
    request = replace(request, cases=shape_set.cases)
    return _Subject(
        operator, shape_set.source, request.cases, lambda group, told: runs(request, group, operator_for, told)
    )


def _of_blocks(
    shapes: str, ranks: int, place: tuple[Literal["cpu", "cuda"], DtypeWord], plans: Sequence[str]
) -> _Subject:
    """Blocks of transformers. Raises InputError."""
    device, dtype = place
    if plans or dtype == "fp8":
        found = f"plan {plans[0]}" if plans else "fp8"
        raise InputError(
            "bench block", found, "Leave --plan out, and name a dtype that trains: the layers choose plans"
        )
    blocks = read_blocks(shapes)
    for case in blocks.cases:
        case.check(ranks)
    request = BenchRequest(operator=BLOCK, device=device, dtype=dtype)

    def compared(group: Group, told: OnPart) -> Iterator[BenchRun]:
        from overweave.block.bench import block_runs  # which imports torch's compiler

        return block_runs(blocks.cases, request, group, told)

    return _Subject(BLOCK, blocks.source, tuple(case.matmul for case in blocks.cases), compared)


def _run_as_rank(
    place: Literal["cpu", "cuda"], subject: _Subject, report: Callable[[BenchRun], BenchReport], file: Path | None
) -> BenchReport:
    """This process's part of a whole run; the first rank draws the progress bar and writes the file, case by case."""
    first = os.environ["RANK"] == "0"
    done = {case.name: index for index, case in enumerate(subject.cases)}
    with (
        join_world(place) as group,
        progress(subject.name, len(subject.cases), is_shown=first) as tell,
    ):

        def on_round(case: str, part: float) -> None:
            tell(case, done[case] + part)

        for so_far in subject.runs(group, on_round):
            told = report(so_far)
            if first and file is not None:
                write_report(file, told)
    return told


def run_on_own_ranks(
    words: list[str], world_size: int, repeats: int, asked: Path | None, variables: Mapping[str, str]
) -> BenchReport:
    """Whole runs in fresh processes: nothing is warm from the last one. However they end, it is said what is written.

    variables: of the environment of the ranks. Raises Exit if a rank fails, which has said why.
    """
    is_kept = asked is not None and (asked.is_file() or not asked.exists())  # and no pipe, which takes it but once
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        file = asked if asked is not None and is_kept else Path(folder, "report.json")
        before, report = _written_ns(file), None
        try:
            for turn in range(1, repeats + 1):
                start_ranks([*words, f"--json={file}"], world_size, {TURN: str(turn), **variables})
        finally:
            report = read_report(file) if _written_ns(file) != before else None
            if report is not None and report.unfinished:
                typer.echo(f"overweave: {file} is unfinished: {report.unfinished}", err=True)
    if report is None:
        raise MachineError("bench", "its ranks wrote nothing", "Read what they printed above")
    if asked is not None and not is_kept:
        write_report(asked, report)
    return report


def _written_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0

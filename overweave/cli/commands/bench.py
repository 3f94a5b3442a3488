"""`overweave bench`: an operator beside baselines and upper bounds, on every rank of one host.

Without torchrun's variables in the environment it starts its own ranks through torchrun, once per whole run; with them
it is one of the ranks.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from msgspec.structs import replace

from overweave.attention.cases import ATTENTION, read_attention
from overweave.block.cases import BLOCK, read_blocks
from overweave.cli.bench_table import BenchReport, print_runs, read_report, report_of, write_report
from overweave.cli.output_file import check_file
from overweave.cli.predicted_layers import predict_attention, predict_layers
from overweave.cli.progress import OnPart, progress
from overweave.cli.ranks import (
    DeviceChoice,
    device_for,
    is_one_of_the_ranks,
    rank_count,
    start_ranks,
    warn_of_long_runs,
)
from overweave.errors import InputError, MachineError, nearest
from overweave.hardware import multicast
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.memory.group import Group
from overweave.moe.cases import EXPERTS, read_experts
from overweave.moe.ways import layer_runs
from overweave.ops.operators import operator_for
from overweave.schedules.records import attention, experts
from overweave.schedules.records.programs import Programs
from overweave.tuner.measure.bench import BenchRequest, BenchRun, join_world, runs
from overweave.tuner.space.shapes import DtypeWord, ShapeCase, read_shapes, usual_set
from overweave.tuner.space.space import candidate_of

NO_MULTICAST_HELP = "The ranks use no NVLink multicast; so it is wherever the environment says so of one library"
SUBJECTS_HELP = f"{', '.join(OPERATORS)}, block: of a transformer, experts: a layer of them, or attention"
RUN_NUMBER = "OVERWEAVE_BENCH_TURN"  # variable with the number of the whole run, from 1, for ranks that we started


def bench(
    operator: Annotated[str, typer.Argument(metavar="OP", help=SUBJECTS_HELP)],
    shapes: Annotated[
        str, typer.Option(help="A file or set of benchmarks/shapes; else mlp, moe, llama or attention")
    ] = "",
    world: Annotated[int, typer.Option("--world", "-w", min=0, max=32, help="0: every GPU, or 4 emulated ranks")] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs where there is one")] = "auto",
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    plan: Annotated[list[str] | None, typer.Option(help="Time these plans in place of our choice")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Of experts, attention: of all ranks, not the shapes'")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Whole runs; the middle one is shown, with the spread")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file, case by case")] = None,
    simulate: Annotated[
        str | None, typer.Option(help="Predict a block, experts or attention on this machine, no ranks")
    ] = None,
    no_multicast: Annotated[bool, typer.Option("--no-multicast", help=NO_MULTICAST_HELP)] = False,
) -> None:
    """Compare an operator, a block or a layer of experts with torch and NCCL and with what torch fuses, in one run."""
    _check_tokens(operator, tokens or ())
    if simulate is not None:
        _predict(operator, shapes, tokens or (), (simulate, world), json)
        return
    place = device_for(device, least=1)
    ranks = rank_count(place, world)
    shape_set = shapes or {BLOCK: "llama", EXPERTS: "moe", ATTENTION: "attention"}.get(operator) or usual_set(operator)
    # Invalid arguments are refused before any rank is started.
    request = BenchRequest(operator=operator, device=place, dtype=dtype, plans=tuple(plan or ()))
    subject = _subject(shape_set, ranks, request, tokens or ())
    warn_of_long_runs(place, subject.cases)
    if json is not None:
        check_file(json)
    run_number = int(os.environ.get(RUN_NUMBER, 0))
    arguments = _arguments(request, shape_set, ranks, tokens or (), repeat)
    if not is_one_of_the_ranks():
        report = run_on_own_ranks(arguments, ranks, repeat, json, dict(multicast.WITHOUT) if no_multicast else {})
    elif repeat > 1 and not run_number:
        raise InputError(f"bench --repeat {repeat}", "torchrun started this process", "Start it without torchrun")
    else:
        earlier = read_report(json).runs[: run_number - 1] if json is not None and run_number > 1 else ()
        command = shlex.join(["overweave", *arguments])
        cases = subject.source, len(subject.cases)
        report = _run_as_rank(place, subject, lambda run: report_of(command, cases, repeat, (*earlier, run)), json)
        if run_number or os.environ["RANK"] != "0":
            return  # another process prints
    print_runs(report.runs, report.middle, report.spread)


def _check_tokens(operator: str, tokens: Sequence[int]) -> None:
    """Raise InputError for tokens of what has none."""
    if tokens and operator not in (EXPERTS, ATTENTION):
        asked = f"bench {operator[:60]} --tokens {tokens[0]}"
        raise InputError(asked, "only experts and attention have tokens", "Name the rows in a file of --shapes")


def _arguments(request: BenchRequest, shapes: str, ranks: int, tokens: Sequence[int], repeat: int) -> list[str]:
    """Return the command for the ranks."""
    return [
        "bench",
        request.operator,
        f"--shapes={shapes}",
        f"--world={ranks}",
        f"--device={request.device}",
        f"--dtype={request.dtype}",
        *(f"--plan={each}" for each in request.plans),
        *(f"--tokens={each}" for each in tokens),
        *([f"--repeat={repeat}"] if repeat > 1 else ()),
    ]


class _Subject(NamedTuple):
    """What is compared: its cases, as matmuls, their source, and the function that runs it on a rank of a group."""

    name: str
    source: str
    cases: tuple[ShapeCase, ...]
    runs: Callable[[Group, OnPart], Iterator[BenchRun]]


def _subject(shapes: str, ranks: int, request: BenchRequest, tokens: Sequence[int]) -> _Subject:
    """Return an operator, blocks, layers of experts or attention on a set. Raises InputError."""
    if request.operator == BLOCK:
        return _block_subject(shapes, ranks, (request.device, request.dtype), request.plans)
    if request.operator == EXPERTS:
        return _program_subject(_EXPERTS_BENCH, shapes, (ranks, tokens), request)
    if request.operator == ATTENTION:
        return _program_subject(_ATTENTION_BENCH, shapes, (ranks, tokens), request)
    return _operator_subject(shapes, ranks, request)


def _operator_subject(shapes: str, ranks: int, request: BenchRequest) -> _Subject:
    """Return an operator on a shape set. Raises InputError."""
    operator = operator_of(request.operator, "bench").name
    shape_set = read_shapes(shapes, operator)
    for case in shape_set.cases:
        case.problem(operator, ranks, request.dtype)
    for plan in request.plans:
        candidate_of(operator, plan)
    request = replace(request, cases=shape_set.cases)
    return _Subject(
        operator,
        shape_set.source,
        request.cases,
        lambda group, on_progress: runs(request, group, operator_for, on_progress),
    )


def _block_subject(
    shapes: str, ranks: int, place: tuple[Literal["cpu", "cuda"], DtypeWord], plans: Sequence[str]
) -> _Subject:
    """Return the blocks of transformers in a set. Raises InputError."""
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

    def compared(group: Group, on_progress: OnPart) -> Iterator[BenchRun]:
        from overweave.block.ways import block_runs  # which imports torch's compiler

        return block_runs(blocks.cases, request, group, on_progress)

    return _Subject(BLOCK, blocks.source, tuple(case.matmul for case in blocks.cases), compared)


class _ProgramBench(NamedTuple):
    """How the cases of a family of programs are read and compared. fp8_obstacle: why there is no fp8, or empty."""

    family: Programs
    read: Callable[[str], Any]
    runs: Callable[..., Iterator[BenchRun]]
    fp8_obstacle: str


def _attention_runs(*given: Any) -> Iterator[BenchRun]:
    from overweave.attention.ways import attention_runs  # which imports torch's tensors over meshes

    return attention_runs(*given)


_EXPERTS_BENCH = _ProgramBench(experts.EXPERTS, read_experts, layer_runs, "")
_ATTENTION_BENCH = _ProgramBench(attention.ATTENTION, read_attention, _attention_runs, "torch's kernels have none")


def _program_subject(
    bench: _ProgramBench, shapes: str, size: tuple[int, Sequence[int]], request: BenchRequest
) -> _Subject:
    """Return how experts or attention are benched on a set of shapes. size: ranks, and the tokens that replace those
    of the set, if any. Raises InputError."""
    asked, plans = f"bench {bench.family.subject}", bench.family.plans
    if request.dtype == "fp8" and bench.fp8_obstacle:
        raise InputError(asked, "fp8", f"Name another dtype: {bench.fp8_obstacle}")
    for plan in request.plans:
        if plan not in plans:
            cure = nearest("Plans", plan, plans, "overweave show")
            raise InputError(f"{asked} --plan {plan[:60]}", "there is no such plan", cure)
    read = bench.read(shapes)
    cases = read.on_ranks(*size)

    def compared(group: Group, on_progress: OnPart) -> Iterator[BenchRun]:
        return bench.runs(cases, request, group, on_progress)

    return _Subject(bench.family.subject, read.source, tuple(case.matmul for case in cases), compared)


def _predict(subject: str, shapes: str, tokens: Sequence[int], place: tuple[str, int], file: Path | None) -> None:
    """Print what is predicted of blocks, of layers of experts, or of attention. Raises InputError for anything else."""
    predictors = {EXPERTS: predict_layers, ATTENTION: predict_attention}
    if subject in predictors:
        predictors[subject](shapes, tokens, place, file)
        return
    from overweave.cli.predicted_blocks import predict_blocks  # which imports torch's compiler

    predict_blocks(subject, shapes, place, file)


def _run_as_rank(
    device: Literal["cpu", "cuda"], subject: _Subject, report: Callable[[BenchRun], BenchReport], file: Path | None
) -> BenchReport:
    """Run this rank's part of a whole run; rank 0 draws the progress bar and writes the file, case by case."""
    first = os.environ["RANK"] == "0"
    done = {case.name: index for index, case in enumerate(subject.cases)}
    with (
        join_world(device) as group,
        progress(subject.name, len(subject.cases), is_shown=first) as progress_report,
    ):

        def on_round(case: str, part: float) -> None:
            progress_report(case, done[case] + part)

        for so_far in subject.runs(group, on_round):
            file_content = report(so_far)
            if first and file is not None:
                write_report(file, file_content)
    return file_content


def run_on_own_ranks(
    arguments: list[str], world_size: int, repeats: int, path: Path | None, variables: Mapping[str, str]
) -> BenchReport:
    """Run each whole run in fresh processes, so that no state carries over, and return the report.

    path: of the report, None for a temporary file. variables: added to the environment of the ranks. If the ranks fail,
    it prints whether the file is unfinished. Raises Exit if a rank fails, which has printed why.
    """
    is_reusable = path is not None and (path.is_file() or not path.exists())  # and no pipe, which takes it but once
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        file = path if path is not None and is_reusable else Path(folder, "report.json")
        before, report = _modified_ns(file), None
        try:
            for run_number in range(1, repeats + 1):
                start_ranks([*arguments, f"--json={file}"], world_size, {RUN_NUMBER: str(run_number), **variables})
        finally:
            report = read_report(file) if _modified_ns(file) != before else None
            if report is not None and report.unfinished:
                typer.echo(f"overweave: {file} is unfinished: {report.unfinished}", err=True)
    if report is None:
        raise MachineError("bench", "its ranks wrote nothing", "Read what they printed above")
    if path is not None and not is_reusable:
        write_report(path, report)
    return report


def _modified_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0

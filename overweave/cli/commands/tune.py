"""`overweave tune`: measures the candidates for a set of shapes and saves the fastest for every later call.

Without torchrun's variables in the environment it starts its own ranks through torchrun; with them it is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.output_file import check_file, write_file
from overweave.cli.plans import AFTER_HELP, SHAPE_HELP, case_of
from overweave.cli.progress import progress
from overweave.cli.ranks import (
    DeviceChoice,
    device_for,
    is_one_of_the_ranks,
    rank_count,
    start_ranks,
    warn_of_long_runs,
)
from overweave.errors import InputError
from overweave.ir.operators.forms import NORM_WEIGHT, SCALE_X
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ir.problem import Problem
from overweave.ops.tune import device_named, tune_and_learn
from overweave.tuner.caches import encode
from overweave.tuner.measure.bench import join_world
from overweave.tuner.measure.search import Tuned
from overweave.tuner.space.shapes import DtypeWord, ShapeCase, read_shapes, usual_set
from overweave.tuner.space.space import library_path
from overweave.tuner.space.target import target_of
from overweave.tuner.store.cache import Fingerprint, Table, bucket_problem, fingerprint, load, path_of


def tune(
    operator: Annotated[str, typer.Argument(metavar="OP", help=" or ".join(OPERATORS))],
    shapes: Annotated[str, typer.Option(help="A file or set of benchmarks/shapes; else mlp or moe")] = "",
    shape: Annotated[str | None, typer.Option(help=f"{SHAPE_HELP}; in place of a set")] = None,
    after: Annotated[str, typer.Option(help=f"With --shape. {AFTER_HELP}")] = "",
    world: Annotated[int, typer.Option("--world", "-w", min=0, max=32, help="0: every GPU, or 4 emulated ranks")] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="auto: GPUs where there are two")] = "auto",
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    json: Annotated[Path | None, typer.Option(help="Add what was measured to this table, beside the cache")] = None,
) -> None:
    """Measure the candidates for a set of shapes, save the fastest, and print it as code."""
    cases = _cases(operator, shapes, shape, after)
    place = device_for(device)
    ranks = rank_count(place, world)
    for case in cases:
        case.problem(operator, ranks, dtype)  # an invalid case is refused before any rank is started
    if json is not None:
        check_file(json)
    warn_of_long_runs(place, cases)
    if not is_one_of_the_ranks():
        words = ["tune", operator, f"--device={place}", f"--dtype={dtype}"]
        words += [f"--shapes={shapes}"] if shape is None else [f"--shape={shape}", f"--after={after}"]
        _tune_on_own_ranks(words + ([f"--json={json}"] if json else []), ranks)
        return
    with join_world(place) as group:
        rank_device = device_named("cpu" if place == "cpu" else None)
        problems = {bucket_problem(case.problem(operator, group.world_size, dtype)): case for case in cases}
        is_first, key = group.rank == 0, fingerprint(target_of(rank_device), group.world_size)
        for name, tuned in _tune_cases(problems, partial(tune_and_learn, group=group, device=rank_device), is_first):
            if is_first:
                _report_case(name, tuned, key, json)
        if is_first and json is not None:
            typer.echo(f"added to {json}")


def _tune_on_own_ranks(arguments: list[str], world_size: int) -> None:
    """Start the ranks; if they are stopped, print that the finished cases are saved. Raises Exit if a rank fails."""
    try:
        start_ranks(arguments, world_size)
    except (KeyboardInterrupt, SystemExit):
        typer.echo("overweave: tune is unfinished: the cases that are printed above are kept", err=True)
        raise


def _tune_cases(
    problems: dict[Problem, ShapeCase], measure: Callable[..., Tuned], is_first: bool
) -> Iterator[tuple[str, Tuned]]:
    """Yield the name and result of each case; the first rank draws the progress bar."""
    with progress("tune", len(problems), is_shown=is_first) as report:
        for done, (problem, case) in enumerate(problems.items()):

            def on_round(part: float, done: int = done, name: str = case.name) -> None:
                report(name, done + part)

            yield case.name, measure(problem, on_round=on_round)


def _report_case(name: str, tuned: Tuned, key: Fingerprint, json: Path | None) -> None:
    """Print the result of a case, and add it to the table of `--json`, before the next one begins."""
    typer.echo(_line(name, tuned))
    typer.echo(f"    {code(tuned.entry.problem, str(tuned.winner))}")
    for text, why in tuned.left_out.items():
        typer.echo(f"    left out: {text}: {why}")
    stored = load(path_of(key), key)
    is_stored = stored is not None and tuned.entry in stored.entries
    typer.echo(f"    kept in {path_of(key)}" if is_stored else f"    not kept: {path_of(key)} could not be written")
    if json is not None:
        table = load(json, key) or Table(fingerprint=key)
        write_file(json, encode(table.with_entries((tuned.entry,))))


def code(problem: Problem, plan: str) -> str:
    """Return the winner as code to paste."""
    weights = f"[{', '.join(f'w{index}' for index in range(len(problem.columns)))}]" if problem.columns else "w"
    epilogue = problem.epilogue
    inputs = (*problem.beside, *((SCALE_X,) if epilogue.scaling else ()))
    keywords = [f"{name}={name}" for name in problem.record.keywords if name in inputs]
    keywords += [f'activation="{epilogue.activation}"'] * bool(epilogue.activation)
    keywords += [f"{name}={each!r}" for name, each in problem.numbers.items() if name in problem.record.keywords]
    keywords += ["norm=ow.RmsNorm(norm_weight)"] * (NORM_WEIGHT in problem.beside)
    return f'ow.{problem.operator}({", ".join(("x", weights, "group", *keywords))}, plan="{plan}")'


def _line(name: str, tuned: Tuned) -> str:
    """Return the result of a case in one line."""
    entry = tuned.entry
    problem, best_us = entry.problem, entry.times[0].us
    line = f"{name}: {problem.extents} a rank, {best_us:.1f} us"
    library = next((time.us for time in entry.times if time.candidate == library_path(problem.operator)), None)
    if library is not None:
        line += f", library {library:.1f} us, {library / best_us:.2f} times"
    share = tuned.cold_share
    return line if share is None else f"{line}; the model's choice has {share:.2f} of its speed"


def _cases(operator: str, shapes: str, shape: str | None, after: str) -> tuple[ShapeCase, ...]:
    """Return the cases to tune. Raises InputError."""
    operator_of(operator, "tune")
    if shape is None and after:
        raise InputError(f"tune after {after[:60]!r}", "no shape is given", "Give --shape, or a set that says it")
    if shape is None:
        return read_shapes(shapes or usual_set(operator), operator).cases
    return (case_of(shape, after, least_rows=1),)

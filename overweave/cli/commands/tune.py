"""`overweave tune`: measures the candidates for a set of shapes and keeps the quickest, as every later call finds them.

Without torchrun's variables in the environment it starts its own ranks through torchrun; with them it is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.destination import check_file, write_file
from overweave.cli.progress import progress
from overweave.cli.ranks import DeviceChoice, how_many, is_one_of_the_ranks, start_ranks, warn_of_hours, where
from overweave.cli.shape import AFTER_HELP, SHAPE_HELP, case_of
from overweave.errors import InputError
from overweave.ir.operators.forms import SCALE_X, registered
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ir.problem import Problem
from overweave.ops.tune import device_named, tune_and_learn
from overweave.tuner.caches import encoded
from overweave.tuner.measure.bench import joined_world
from overweave.tuner.measure.search import Tuned
from overweave.tuner.space.shapes import DtypeWord, ShapeCase, read_shapes, usual_set
from overweave.tuner.space.space import library_path
from overweave.tuner.space.target import target_of
from overweave.tuner.store.cache import fingerprint, load, path_of
from overweave.tuner.store.table import Fingerprint, Table, bucketed


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
    """Measure the candidates for a set of shapes, keep the quickest, and print it as code."""
    cases = _cases(operator, shapes, shape, after)
    place = where(device)
    ranks = how_many(place, world)
    for case in cases:
        case.problem(operator, ranks, dtype)  # what cannot be is refused before any rank is started
    if json is not None:
        check_file(json)
    warn_of_hours(place, cases)
    if not is_one_of_the_ranks():
        words = ["tune", operator, f"--device={place}", f"--dtype={dtype}"]
        words += [f"--shapes={shapes}"] if shape is None else [f"--shape={shape}", f"--after={after}"]
        _tune_on_own_ranks(words + ([f"--json={json}"] if json else []), ranks)
        return
    with joined_world(place) as group:
        own = device_named("cpu" if place == "cpu" else None)
        problems = {bucketed(case.problem(operator, group.world_size, dtype)): case for case in cases}
        is_first, which = group.rank == 0, fingerprint(target_of(own), group.world_size)
        for name, tuned in _tuned(problems, partial(tune_and_learn, group=group, device=own), is_first):
            if is_first:
                _tell(name, tuned, which, json)
        if is_first and json is not None:
            typer.echo(f"added to {json}")


def _tune_on_own_ranks(words: list[str], world_size: int) -> None:
    """However they end, it is said what is kept. Raises Exit if a rank fails, which has said why."""
    try:
        start_ranks(words, world_size)
    except (KeyboardInterrupt, SystemExit):
        typer.echo("overweave: tune is unfinished: the cases that are printed above are kept", err=True)
        raise


def _tuned(
    problems: dict[Problem, ShapeCase], measure: Callable[..., Tuned], is_first: bool
) -> Iterator[tuple[str, Tuned]]:
    """The name of each case and what came out, one after the other; the first rank draws the progress bar."""
    with progress("tune", len(problems), is_shown=is_first) as tell:
        for done, (problem, case) in enumerate(problems.items()):

            def on_round(part: float, done: int = done, name: str = case.name) -> None:
                tell(name, done + part)

            yield case.name, measure(problem, on_round=on_round)


def _tell(name: str, tuned: Tuned, own: Fingerprint, json: Path | None) -> None:
    """Prints a case that is tuned, and adds it to the table that was asked for, before the next one begins."""
    typer.echo(_line(name, tuned))
    typer.echo(f"    {code(tuned.entry.problem, str(tuned.winner))}")
    for text, why in tuned.left_out.items():
        typer.echo(f"    left out: {text}: {why}")
    kept = load(path_of(own), own)
    is_kept = kept is not None and tuned.entry in kept.entries
    typer.echo(f"    kept in {path_of(own)}" if is_kept else f"    not kept: {path_of(own)} could not be written")
    if json is not None:
        table = load(json, own) or Table(fingerprint=own)
        write_file(json, encoded(table.with_entries((tuned.entry,))))


def code(problem: Problem, plan: str) -> str:
    """The winner as code to paste."""
    weights = f"[{', '.join(f'w{index}' for index in range(len(problem.columns)))}]" if problem.columns else "w"
    epilogue = problem.epilogue
    read = (*problem.beside, *((SCALE_X,) if epilogue.scaling else ()))
    given = [f"{name}={name}" for name in problem.record.keywords if name in read]
    given += [f'activation="{epilogue.activation}"'] * bool(epilogue.activation)
    for added in epilogue.added:
        numbers = zip(registered(added.name).numbers, added.numbers, strict=True)
        given += [f"{name}={number!r}" for name, number in numbers]
    given += ["norm=ow.RmsNorm(norm_weight)"] * bool(problem.of_rows)
    return f'ow.{problem.operator}({", ".join(("x", weights, "group", *given))}, plan="{plan}")'


def _line(name: str, tuned: Tuned) -> str:
    entry = tuned.entry
    problem, best_us = entry.problem, entry.times[0].us
    line = f"{name}: {problem.extents} a rank, {best_us:.1f} us"
    library = next((time.us for time in entry.times if time.candidate == library_path(problem.operator)), None)
    if library is not None:
        line += f", library {library:.1f} us, {library / best_us:.2f} times"
    share = tuned.cold_share
    return line if share is None else f"{line}; the model's choice has {share:.2f} of its speed"


def _cases(operator: str, shapes: str, shape: str | None, after: str) -> tuple[ShapeCase, ...]:
    """Raises InputError."""
    operator_of(operator, "tune")
    if shape is None and after:
        raise InputError(f"tune after {after[:60]!r}", "no shape is given", "Give --shape, or a set that says it")
    if shape is None:
        return read_shapes(shapes or usual_set(operator), operator).cases
    return (case_of(shape, after, least_rows=1),)

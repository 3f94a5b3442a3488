"""`overweave explain`: which plan an operator takes for a shape, or which schedule a compiled kernel, and why."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer

from overweave.cli.of_kernel import numbers_of, schedules_of
from overweave.cli.shape import SHAPE_HELP, problem_of_shape, shapes_of, tell_of_rounding
from overweave.errors import InputError, package_error
from overweave.ops.explain import explain as explain_choice
from overweave.ops.scales import dtype_of
from overweave.tuner.shapes import DTYPES, DtypeWord

AFTER_HELP = "What happens to the product: bias+silu+residual, gate+silu, residual+rms_norm, ..."
NUMBERS_HELP = "its integer arguments, such as M=8192,N=3584,BLOCK_M=128"
SCHEDULE_HELP = "Of a kernel: `all_gather.auto`, or `TENSOR:SCHEDULE`, once for each tensor"


def explain(
    operator: Annotated[str, typer.Argument(metavar="OP|FILE.py:KERNEL", help="Such as all_gather_matmul")],
    shape: Annotated[str, typer.Option(help=f"{SHAPE_HELP}; of a kernel, {NUMBERS_HELP}")],
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=1024, help="How many ranks")] = 4,
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda without a GPU at hand means an H200")] = "cuda",
    after: Annotated[str, typer.Option(help=AFTER_HELP)] = "",
    norm: Annotated[bool, typer.Option("--norm", help="As --after residual+rms_norm")] = False,
    schedule: Annotated[list[str], typer.Option(help=SCHEDULE_HELP)] = [],  # noqa: B006 - typer's own
) -> None:
    """Say which plan an operator would take for a shape, or which schedule an annotated kernel, and why."""
    if ":" in operator:
        if norm or after or not schedule:
            raise InputError(f"explain {operator[:60]}", "it is a kernel", "Ask for it by --schedule and --shape alone")
        auto = _compile_auto()(operator, schedules_of(schedule))
        typer.echo(auto.explain(numbers_of(shape), world, DTYPES[dtype]))
        return
    if schedule:
        raise InputError(f"explain {operator[:60]} --schedule", "it is no kernel", "Name one, as FILE.py:KERNEL")
    problems = [problem_of_shape(operator, each, world) for each in shapes_of(shape)]
    columns = tuple(problem.n for problem in problems)
    m, k, kind = problems[0].m, problems[0].k, dtype_of(DTYPES[dtype])
    n = columns if len(columns) > 1 else columns[0]
    if norm and after:
        raise InputError(f"explain --norm --after {after[:60]}", "two endings", "Join all of it by + behind --after")
    after = "residual+rms_norm" if norm else after
    choice = explain_choice(operator, m=m, n=n, k=k, world_size=world, dtype=kind, device=device, after=after)
    tell_of_rounding(operator, shape, world)
    typer.echo(str(choice))


def _compile_auto() -> Any:
    """`compile_auto`, loaded where a kernel is asked for: it needs LibCST, which operators do without."""
    try:
        return resolve_name("overweave.ops.compile_auto:compile_auto")
    except ModuleNotFoundError as error:
        raise package_error("explain a kernel", error) from error

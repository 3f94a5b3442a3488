"""`overweave explain`: which plan an operator takes for a shape, and why."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from overweave.cli.shape import SHAPE_HELP, problem_of_shape, shapes_of, tell_of_rounding
from overweave.errors import InputError
from overweave.ops.call.scales import dtype_of
from overweave.ops.explain import explain as explain_choice
from overweave.tuner.space.shapes import DTYPES, DtypeWord

AFTER_HELP = "What happens to the product: bias+silu+residual, gate+silu, residual+rms_norm, ..."


def explain(
    operator: Annotated[
        str,
        typer.Argument(
            metavar="OP", help="An operator, such as all_gather_matmul; or FILE.py:KERNEL, with options of its own"
        ),
    ],
    shape: Annotated[str, typer.Option(help=SHAPE_HELP)],
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=1024, help="How many ranks")] = 4,
    dtype: Annotated[DtypeWord, typer.Option(help="fp8: e4m3, scaled by rows, into bf16")] = "bf16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda without a GPU at hand means an H200")] = "cuda",
    after: Annotated[str, typer.Option(help=AFTER_HELP)] = "",
    norm: Annotated[bool, typer.Option("--norm", help="As --after residual+rms_norm")] = False,
) -> None:
    """Say which plan an operator would take for a shape, and why."""
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

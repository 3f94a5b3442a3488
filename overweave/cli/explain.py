"""`overweave explain`: which plan an operator takes for a shape, and why."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from overweave.cli.trace import problem_of_shape
from overweave.ops.arguments import DTYPES
from overweave.ops.explain import explain as explain_choice

NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def explain(
    operator: Annotated[str, typer.Argument(metavar="OP", help="An operator, such as all_gather_matmul")],
    shape: Annotated[str, typer.Option(help="M,N,K of the global matmul, before tensor parallelism")],
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=1024, help="How many ranks")] = 4,
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option()] = "bf16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda without a GPU at hand means an H200")] = "cuda",
    norm: Annotated[bool, typer.Option("--norm", help="The call ends with a residual and an RMSNorm")] = False,
) -> None:
    """Say which plan an operator would take for a shape, and why."""
    problem = problem_of_shape(operator, shape, world)
    named = {name: known for known, name in DTYPES.items()}
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "world_size": world}
    choice = explain_choice(operator, **sizes, dtype=named[NAMES[dtype]], device=device, norm=norm)
    typer.echo(str(choice))

"""`overweave explain FILE.py:KERNEL`: which schedule a compiled kernel would take for its integer
arguments, and why.
"""

from __future__ import annotations

from typing import Annotated

import typer

from overweave.cli.plans import integers_of, schedules_of
from overweave.ops.author.compile_auto import compile_auto
from overweave.tuner.space.shapes import DTYPES, DtypeWord


def explain_kernel(
    kernel: Annotated[str, typer.Argument(metavar="FILE.py:KERNEL", help="An annotated @triton.jit function.")],
    schedule: Annotated[list[str], typer.Option(help="`all_gather.auto`, or `TENSOR:SCHEDULE`, once for each tensor")],
    numbers: Annotated[str, typer.Option(help="Its integer arguments, such as M=8192,N=3584,BLOCK_M=128")],
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=1024, help="How many ranks")] = 4,
    dtype: Annotated[DtypeWord, typer.Option(help="Of the tensors that are exchanged")] = "bf16",
) -> None:
    """Print the predicted choice of a kernel's schedule (`overweave explain FILE.py:KERNEL`), and why others were
    rejected."""
    auto = compile_auto(kernel, schedules_of(schedule))
    typer.echo(auto.explain(integers_of(numbers), world, DTYPES[dtype]))

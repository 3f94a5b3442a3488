"""`overweave compile FILE.py:KERNEL --schedule NAME`: the fused kernel's source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.limits import limited
from overweave.cli.output_file import write_file
from overweave.cli.plans import schedules_of
from overweave.compiler.emit.fuse import kernel_of
from overweave.errors import InputError
from overweave.ops.author.arguments import kernel_location
from overweave.ops.author.compile import compile as fuse
from overweave.ops.author.trial import CHECKED, arguments_of, check_footprint

UNDECIDED = 3  # the exit status of what was neither checked nor found untrue


def compile(
    kernel: Annotated[str, typer.Argument(metavar="FILE.py:KERNEL", help="An annotated @triton.jit function.")],
    schedule: Annotated[
        list[str] | None, typer.Option(help="`all_gather.push pieces=2`, or `TENSOR:SCHEDULE`, once for each tensor.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to write it; else it is printed.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Try the directives instead: needs --shape.")] = False,
    shape: Annotated[
        str, typer.Option(help="`M=4096,BLOCK_M=128,eps=1e-5`, and `a_desc=128x64`, the block of a descriptor.")
    ] = "",
) -> None:
    """Write the fused kernel that a call would run, for two ranks or more. It imports and runs by itself. With --check:
    exit 0 checked, 1 untrue, 2 unusable, 3 not checked."""
    if check:
        with limited(kernel_location(kernel)[0]):
            read = kernel_of(*kernel_location(kernel))
        outcome = check_footprint(read, arguments_of(read, shape), ignore_cache=True)
        typer.echo(f"{read.source.name}: directives {outcome}")
        raise typer.Exit(0 if outcome == CHECKED else UNDECIDED)
    if not schedule:
        raise InputError("compile a kernel", "no schedule", "Name one by --schedule, or pass --check --shape ...")
    with limited(kernel_location(kernel)[0]):
        text = fuse(kernel, schedules_of(schedule)).source()
    if out is not None and out.resolve() == kernel_location(kernel)[0].resolve():
        raise InputError(f"write {out}", "it holds the kernel that was compiled", "Name another file")
    if out is None:
        typer.echo(text, nl=False)
        return
    write_file(out, text.encode())
    typer.echo(f"{out}: {len(text.splitlines())} lines")

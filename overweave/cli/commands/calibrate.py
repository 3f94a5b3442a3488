"""`overweave calibrate`: measures this GPU and writes a machine file for predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.output_file import check_file, write_file
from overweave.cli.progress import progress
from overweave.cli.ranks import is_one_of_the_ranks, start_ranks
from overweave.errors import InputError, MachineError
from overweave.hardware.cards import find
from overweave.hardware.machine import load
from overweave.memory.cuda.card import current_gpu
from overweave.runtime.diagnosis import reason_without_gpu
from overweave.tuner.calibrate.machine_file import FROM_FILE, PARTS, machine_file, measure_machine
from overweave.tuner.measure.bench import device_count, join_world
from overweave.tuner.space.target import save_calibrated


def calibrate(
    out: Annotated[Path | None, typer.Argument(metavar="FILE.json", help="A file to write, too")] = None,
    links: Annotated[
        str, typer.Option(help="The machine, or a file of one, that has what is not measured; else that of the GPU")
    ] = "",
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=8, help="GPUs; with several, copies, too")] = 1,
) -> None:
    """Measure this GPU's rates and latencies as a machine file, which later calls on this machine predict with."""
    if out is not None and out.suffix != ".json":
        raise InputError(f"calibrate {out}", "a machine file ends in .json", f"Write {out.with_suffix('.json')}")
    if links:
        load(links)
    if out is not None:
        check_file(out)
    if not is_one_of_the_ranks():
        if not device_count():
            raise MachineError("calibrate", *reason_without_gpu())
        if device_count() < world:
            gpus = f"{device_count()} GPUs for {world} ranks"
            raise MachineError("calibrate", gpus, "Run it on a machine with that many NVIDIA GPUs, or give --world")
        start_ranks(["calibrate", *([str(out)] if out else []), *([f"--links={links}"] if links else [])], world)
        return
    with join_world("cuda") as group:
        is_first = group.rank == 0
        gpu = current_gpu()
        like = load(links or find(gpu).machine)
        with progress("calibrate", len(PARTS), is_shown=is_first) as report:
            measured, source = measure_machine(like, report)
        if is_first:
            data = machine_file(out.stem if out else "calibrated", measured, like, source)
            path = save_calibrated(gpu, data)
            if out is not None:
                write_file(out, data)
            copied = [name for name in FROM_FILE if not (name == "links" and measured.push_points)]
            typer.echo(f"{path}: {measured.device}; not measured, and taken from {like.name}: {', '.join(copied)}")
            typer.echo("Calls on this machine predict by it: overweave explain OP --shape M,N,K")

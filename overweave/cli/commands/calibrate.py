"""`overweave calibrate`: measures the GPU at hand and writes a machine file that every prediction can be made on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overweave.cli.destination import check_file, write_file
from overweave.cli.progress import progress
from overweave.cli.ranks import is_one_of_the_ranks, start_ranks
from overweave.errors import InputError, MachineError
from overweave.hardware.machine import load
from overweave.runtime.diagnosis import no_gpu
from overweave.tuner.calibrate.calibration import PARTS, calibrated
from overweave.tuner.calibrate.machine_file import FROM_FILE, machine_file
from overweave.tuner.measure.bench import device_count, joined_world


def calibrate(
    out: Annotated[Path, typer.Argument(metavar="FILE.json", help="The machine file to write")],
    links: Annotated[str, typer.Option(help="The machine, or a file of one, that has what is not measured")] = "h200x4",
    world: Annotated[int, typer.Option("--world", "-w", min=1, max=8, help="GPUs; with several, copies, too")] = 1,
) -> None:
    """Measure this GPU's rates and latencies, and write them as a machine file with versions and date."""
    if out.suffix != ".json":
        raise InputError(f"calibrate {out}", "a machine file ends in .json", f"Write {out.with_suffix('.json')}")
    like = load(links)
    check_file(out)
    if not is_one_of_the_ranks():
        if not device_count():
            raise MachineError("calibrate", *no_gpu())
        if device_count() < world:
            gpus = f"{device_count()} GPUs for {world} ranks"
            raise MachineError("calibrate", gpus, "Run it on a machine with that many NVIDIA GPUs, or give --world")
        start_ranks(["calibrate", str(out), f"--links={links}"], world)
        return
    with joined_world("cuda") as group:
        is_first = group.rank == 0
        with progress("calibrate", len(PARTS), is_shown=is_first) as tell:
            found, source = calibrated(like, tell)
        if is_first:
            write_file(out, machine_file(out.stem, found, like, source))
            taken = [name for name in FROM_FILE if not (name == "links" and found.push_points)]
            typer.echo(f"{out}: {found.device}; not measured, and taken from {like.name}: {', '.join(taken)}")
            typer.echo(f"overweave simulate SCHEDULE --shape M,N,K --machine {out}")

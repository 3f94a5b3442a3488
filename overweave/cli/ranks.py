"""Trials on the ranks at hand: emulated ones forked from this process, or one process per GPU through torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
import typer

from overweave.errors import MachineError
from overweave.ir.plan import Problem
from overweave.ops.dispatch import target_of
from overweave.ops.trial import Case, Trial, try_case, try_on_forked_rank
from overweave.runtime.backends import load
from overweave.runtime.processes import run_ranks
from overweave.schedules.catalog import template_of
from overweave.tuner.bench import NO_MULTICAST, device_count, joined_world
from overweave.tuner.choose import Target, kernel_obstacle, tile_options

Device = Literal["auto", "cpu", "cuda"]
CPU_RANKS = 4
TIMEOUT_S = 600.0
# Tiles of a size at which the interpreter still has several for each chunk, and how many steps of its main loops, at
# about 2 ms each, are worth a rank's wait.
EMULATED_TILES = {"block_m": 32, "block_n": 64, "block_k": 32}
INTERPRETED_STEPS = 4096


def is_one_of_the_ranks() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ


def where(device: Device) -> Literal["cpu", "cuda"]:
    """The device meant by `auto`: a GPU where there are at least two."""
    if device == "auto":
        return "cuda" if device_count() > 1 else "cpu"
    return device


def how_many(device: str, asked: int) -> int:
    """How many ranks; 0 asks for every GPU, or four emulated ones. Raises MachineError for more than there are GPUs."""
    if device == "cpu":
        return asked or CPU_RANKS
    gpus = device_count()
    if not gpus or asked > gpus:
        raise MachineError(f"run on {asked or 'all'} GPUs", f"torch sees {gpus}", "Ask for fewer ranks, or for the CPU")
    return asked or gpus


def case_of(schedule: str, problem: Problem, device: str, options: dict[str, str | int]) -> Case:
    """A schedule on a device: with the best tile kernel on a GPU; interpreted on the CPU, where that ends in time."""
    if not template_of(schedule).is_fused:
        return Case(schedule, problem, options, "library")
    if device == "cuda":
        best = tile_options(target_of(torch.device("cuda", torch.cuda.current_device())))
        return Case(schedule, problem, best | options)
    block_m, block_n, block_k = EMULATED_TILES.values()
    steps = -(-problem.m // block_m) * -(-problem.n // block_n) * -(-problem.k // block_k)
    if steps > INTERPRETED_STEPS or kernel_obstacle(problem, Target("cpu")):
        return Case(schedule, problem, options, "library")
    return Case(schedule, problem, {**EMULATED_TILES, "pieces": 2} | options)


def try_emulated(cases: Sequence[Case], world_size: int) -> list[Trial]:
    """The cases one after the other on forked ranks. Raises MachineError if this process compiles kernels already."""
    if any(case.depth == "interpreter" for case in cases):
        load("host interpreter")  # once, here: the ranks inherit it
    told = run_ranks(try_on_forked_rank, world_size, tuple(cases), timeout_s=TIMEOUT_S, group_timeout_s=TIMEOUT_S / 4)
    return msgspec.convert(told[0], list[Trial])


def start_on_gpus(words: Sequence[str], world_size: int) -> None:
    """Runs this command again as one process per GPU, of which rank 0 prints and writes. Raises Exit if it failed."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
        "-m", "overweave.cli.main", *words,
    ]  # fmt: skip
    columns = str(shutil.get_terminal_size().columns)
    environment = {**os.environ, **NO_MULTICAST, "COLUMNS": columns, "OMP_NUM_THREADS": "4"}
    ended = subprocess.run(command, env=environment, check=False)
    if ended.returncode:
        raise typer.Exit(1)


def try_as_rank(schedules: Sequence[tuple[str, Problem, dict[str, str | int]]]) -> list[Trial]:
    """This process's part of trials on GPUs; on rank 0 what came out, nothing elsewhere."""
    with joined_world("cuda") as group:
        device = torch.device("cuda", torch.cuda.current_device())
        trials = [try_case(case_of(name, problem, "cuda", asked), group, device) for name, problem, asked in schedules]
    return [trial for trial in trials if trial is not None]

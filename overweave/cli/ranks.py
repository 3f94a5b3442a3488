"""The ranks of a command: emulated ones forked from this process, or one process per GPU through torchrun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal

import msgspec
import typer
from rich.console import Console

from overweave.cli import user_files
from overweave.cli.progress import progress
from overweave.errors import MachineError
from overweave.hardware import multicast
from overweave.ir.problem import Problem
from overweave.ops.trial import TrialCase, TrialResult, case_of, try_case, try_on_forked_rank
from overweave.runtime.backends import load
from overweave.runtime.diagnosis import reason_without_gpu
from overweave.runtime.host.processes import die_with_parent, run_ranks
from overweave.tuner.measure.bench import SHARED_GPU, device_count, join_world
from overweave.tuner.space.shapes import ShapeCase as Shape

DeviceChoice = Literal["auto", "cpu", "cuda"]
CPU_RANKS = SHARING_RANKS = 4
LONG_ON_A_CPU = 2**32  # multiplications of one matmul: a tenth of a second, and it runs hundreds of times
TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 40.0  # torchrun kills ranks that do not end within 30 s


def warn_of_long_runs(device: str, cases: Sequence[Shape]) -> None:
    """Warn if CPU ranks would compute shapes that are meant for GPUs."""
    largest = max((case.m * case.n * case.k for case in cases), default=0)
    if device == "cpu" and largest > LONG_ON_A_CPU and not is_one_of_the_ranks():
        typer.echo("overweave: on a CPU shapes of this size take hours; --shapes FILE names smaller ones", err=True)


def is_one_of_the_ranks() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ


def device_for(device: DeviceChoice, least: int = 2) -> Literal["cpu", "cuda"]:
    """Return the device; `auto` is a GPU if there are at least `least`."""
    if device == "auto":
        return "cuda" if device_count() >= least else "cpu"
    return device


def rank_count(device: str, requested: int, may_share: bool = False) -> int:
    """Return the number of ranks; 0 stands for every GPU, or four emulated ones. Raises MachineError for too few GPUs.

    In a rank of torchrun, the size of its world. may_share: more ranks than GPUs share them; on one GPU there are four.
    """
    if is_one_of_the_ranks() and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if device == "cpu":
        return requested or CPU_RANKS
    gpus = device_count()
    if may_share and gpus and (gpus == 1 or requested > gpus):
        return requested or SHARING_RANKS
    if not gpus:
        raise MachineError(f"run on {requested or 'all'} GPUs", *reason_without_gpu())
    if requested > gpus:
        raise MachineError(
            f"run on {requested or 'all'} GPUs", f"torch sees {gpus}", "Ask for fewer ranks, or for the CPU"
        )
    return requested or gpus


RequestedPlan = tuple[str, Problem, dict[str, str | int]]  # a schedule, its problem and its options


def run_trials(
    cases: Sequence[RequestedPlan], device: str, world_size: int, arguments: Sequence[str]
) -> list[TrialResult]:
    """Return the results of trials; [] in a process whose ranks print them. arguments: of the command, to start ranks.
    Raises MachineError if this process, which would be forked, has compiled kernels already."""
    if device == "cpu":
        return _try_emulated([case_of(name, problem, "cpu", options) for name, problem, options in cases], world_size)
    if not is_one_of_the_ranks():
        start_ranks(arguments, world_size)
        return []
    with join_world("cuda") as group:
        trials = [try_case(case_of(name, problem, "cuda", options), group) for name, problem, options in cases]
    return [trial for trial in trials if trial is not None]


def _try_emulated(cases: Sequence[TrialCase], world_size: int) -> list[TrialResult]:
    """Run trials on ranks forked from this process."""
    if any(case.depth == "interpreter" for case in cases):
        load("host interpreter")  # once, here: the ranks inherit it
    results = run_ranks(
        try_on_forked_rank,
        world_size,
        tuple(cases),
        timeout_s=TIMEOUT_S,
        group_timeout_s=TIMEOUT_S / 4,
        meanwhile=progress(f"{world_size} emulated ranks run {', '.join(case.schedule for case in cases)}", None),
    )
    return msgspec.convert(results[0], list[TrialResult])


def start_ranks(arguments: Sequence[str], world_size: int, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run this command again as one process per rank; rank 0 prints and writes. Raises Exit if it failed. variables:
    added to the environment of the ranks."""
    columns, threads = shutil.get_terminal_size().columns, max(1, min(4, (os.cpu_count() or 1) // world_size))
    defaults = {"COLUMNS": str(columns), "OMP_NUM_THREADS": str(threads)}
    exit_code = torchrun(
        ["overweave.cli.main", *user_files.load_options(), *arguments], world_size, defaults | dict(variables)
    )
    if exit_code:
        raise typer.Exit(exit_code)


def torchrun(arguments: Sequence[str], world_size: int, variables: Mapping[str, str] | None = None) -> int:
    """Run a module with its arguments as one process per rank, and return the exit code. No rank outlives this process.

    variables: added to this process's environment. If that switches NVLink multicast off for one library, it is
    switched off for all.
    """
    shared = SHARED_GPU if 0 < device_count() < world_size else {}
    launcher = ["-m", "overweave.runtime.torchrun", "--standalone", f"--nproc-per-node={world_size}"]
    command = [sys.executable, *launcher, "-m", *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, **multicast.settings_for_child(os.environ), **shared, **(variables or {})},
        process_group=0,  # Ctrl-C reaches this process only, which ends torchrun once and waits for it
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    ) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        finally:
            Console(stderr=True).show_cursor()  # a killed rank's progress bar leaves it hidden

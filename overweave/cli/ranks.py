"""Trials on the ranks at hand: emulated ones forked from this process, or one process per GPU through torchrun."""

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

from overweave.cli import loaded
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
LONG_ON_A_CPU = 2**32  # products of one matmul: a tenth of a second, hundreds of times
TIMEOUT_S = 600.0
ENDING_S = 40.0  # torchrun asks its ranks to end, and kills after 30 s those that do not


def warn_of_hours(device: str, cases: Sequence[Shape]) -> None:
    """Says so where processors of this host would compute for GPUs, again and again."""
    largest = max((case.m * case.n * case.k for case in cases), default=0)
    if device == "cpu" and largest > LONG_ON_A_CPU and not is_one_of_the_ranks():
        typer.echo("overweave: on a CPU shapes of this size take hours; --shapes FILE names smaller ones", err=True)


def is_one_of_the_ranks() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ


def where(device: DeviceChoice, least: int = 2) -> Literal["cpu", "cuda"]:
    """The device meant by `auto`: a GPU where there are at least so many."""
    if device == "auto":
        return "cuda" if device_count() >= least else "cpu"
    return device


def how_many(device: str, asked: int, may_share: bool = False) -> int:
    """How many ranks; 0 asks for every GPU, or four emulated ones. Raises MachineError for more than there are GPUs.

    Where torchrun has started them, as many as there are. may_share: ranks may be more than GPUs, and are four on one.
    """
    if is_one_of_the_ranks() and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if device == "cpu":
        return asked or CPU_RANKS
    gpus = device_count()
    if may_share and gpus and (gpus == 1 or asked > gpus):
        return asked or SHARING_RANKS
    if not gpus:
        raise MachineError(f"run on {asked or 'all'} GPUs", *reason_without_gpu())
    if asked > gpus:
        raise MachineError(f"run on {asked or 'all'} GPUs", f"torch sees {gpus}", "Ask for fewer ranks, or for the CPU")
    return asked or gpus


RequestedPlan = tuple[str, Problem, dict[str, str | int]]  # a schedule, what it computes, and its options


def tried(asked: Sequence[RequestedPlan], device: str, world_size: int, words: Sequence[str]) -> list[TrialResult]:
    """What came out of trials; nothing in a process of which another one tells it. words: start it as a rank on GPUs.

    Raises MachineError if this process, which would be forked, compiles kernels already.
    """
    if device == "cpu":
        return _try_emulated([case_of(name, problem, "cpu", options) for name, problem, options in asked], world_size)
    if not is_one_of_the_ranks():
        start_ranks(words, world_size)
        return []
    with join_world("cuda") as group:
        trials = [try_case(case_of(name, problem, "cuda", options), group) for name, problem, options in asked]
    return [trial for trial in trials if trial is not None]


def _try_emulated(cases: Sequence[TrialCase], world_size: int) -> list[TrialResult]:
    if any(case.depth == "interpreter" for case in cases):
        load("host interpreter")  # once, here: the ranks inherit it
    told = run_ranks(
        try_on_forked_rank,
        world_size,
        tuple(cases),
        timeout_s=TIMEOUT_S,
        group_timeout_s=TIMEOUT_S / 4,
        meanwhile=progress(f"{world_size} emulated ranks run {', '.join(case.schedule for case in cases)}", None),
    )
    return msgspec.convert(told[0], list[TrialResult])


def start_ranks(words: Sequence[str], world_size: int, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Runs this command again as one process per rank, of which rank 0 prints and writes. Raises Exit if it failed.

    variables: of the environment of the ranks.
    """
    columns, threads = shutil.get_terminal_size().columns, max(1, min(4, (os.cpu_count() or 1) // world_size))
    usual = {"COLUMNS": str(columns), "OMP_NUM_THREADS": str(threads)}
    ended = torchrun(["overweave.cli.main", *loaded.words(), *words], world_size, usual | dict(variables))
    if ended:
        raise typer.Exit(ended)


def torchrun(words: Sequence[str], world_size: int, variables: Mapping[str, str] | None = None) -> int:
    """Runs a module with its words as one process per rank; the exit code. No rank outlives this process.

    variables: of the environment, beside what this process has. Where one library is told to go without NVLink
    multicast, so are all.
    """
    shared = SHARED_GPU if 0 < device_count() < world_size else {}
    launcher = ["-m", "overweave.runtime.torchrun", "--standalone", f"--nproc-per-node={world_size}"]
    command = [sys.executable, *launcher, "-m", *words]
    with subprocess.Popen(
        command,
        env={**os.environ, **multicast.settings_for_child(os.environ), **shared, **(variables or {})},
        process_group=0,  # Ctrl-C comes to this process alone, which ends torchrun once and waits for it
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    ) as started:
        try:
            return started.wait()
        except BaseException:
            started.terminate()
            try:
                started.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                started.kill()
            raise
        finally:
            Console(stderr=True).show_cursor()  # a rank that was ended has left it hidden, behind its progress bar

"""Ranks as forked processes: tests, demo and benchmarks start them from one process that has imported torch.

Results and errors come back as JSON over a pipe. Whatever happens, no process outlives its deadline or its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from overweave.errors import OverweaveError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_DUMP_SIGNAL = signal.SIGQUIT  # a rank that gets it dumps the stacks of its threads, and continues
_DUMP_S = 1.0


@dataclass(frozen=True)
class ProcessOutcome:
    """How a rank ended. value: what the function returned. error: class name of what it raised, None if nothing.

    message: of the error; of a rank that was killed at the deadline, the stacks of its threads.
    exit_signal: the signal that ended it, 0 if none; `SIGKILL` also for a rank that was killed at the deadline.
    """

    rank: int
    value: Any
    error: str | None
    message: str
    exit_signal: int


class RanksFailed(OverweaveError):
    """Some ranks raised, died or did not end in time; `outcomes` holds every rank's."""

    def __init__(self, outcomes: list[ProcessOutcome]) -> None:
        self.outcomes = outcomes
        bad = [outcome for outcome in outcomes if outcome.error or outcome.exit_signal]
        found = "; ".join(
            f"rank {one.rank}: {one.message.rstrip('.') or signal.Signals(one.exit_signal).name}" for one in bad
        )
        super().__init__(f"run {len(outcomes)} ranks", found, "")


class RankProcesses:
    """Running ranks. A context manager: on leaving, all processes are gone and the private folder too."""

    def __init__(self, function: Callable[..., Any], world_size: int, *arguments: Any, group_timeout_s: float) -> None:
        self.world_size = world_size
        self.processes: list[int] = []
        self._pipes: list[int] = []
        self._received = [b""] * world_size
        self._statuses: list[int | None] = [None] * world_size
        self._folder = tempfile.mkdtemp(prefix="overweave-")
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(world_size):
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(reader)
                _run_rank(function, arguments, (rank, world_size), (self._folder, group_timeout_s), writer)
            os.close(writer)
            self.processes.append(process)
            self._pipes.append(reader)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        for rank, pipe in enumerate(self._pipes):
            self._reap(rank)
            os.close(pipe)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to some ranks, or to all, that still run."""
        for rank in ranks or range(self.world_size):
            if self._statuses[rank] is None:
                os.kill(self.processes[rank], number)

    def wait(self, timeout_s: float, *ranks: int) -> list[ProcessOutcome]:
        """Wait for some ranks, or for all; kill those that have not ended by the deadline. Return their outcomes."""
        waited = list(ranks or range(self.world_size))
        open_pipes = {self._pipes[rank]: rank for rank in waited}
        end_s = time.monotonic() + timeout_s
        while open_pipes and (left_s := end_s - time.monotonic()) > 0:
            for pipe in select.select(list(open_pipes), [], [], left_s)[0]:
                data = os.read(pipe, 1 << 16)
                self._received[open_pipes[pipe]] += data
                if not data:
                    del open_pipes[pipe]
        late = self.end(list(open_pipes.values()), timeout_s)
        return [late[rank] if rank in late else self.outcome(rank) for rank in waited]

    def end(self, late: list[int], timeout_s: float) -> dict[int, ProcessOutcome]:
        """Dump the stacks of ranks that have not ended after `timeout_s`, and kill them."""
        for rank in late:
            os.kill(self.processes[rank], _DUMP_SIGNAL)
        end_s = time.monotonic() + _DUMP_S
        while time.monotonic() < end_s and not all(_is_dump_complete(self._stack(rank)) for rank in late):
            time.sleep(0.02)
        for rank in late:
            os.kill(self.processes[rank], signal.SIGKILL)
        late_text = f"had not ended after {timeout_s:g} s and was killed"
        stacks = {rank: _text(self._stack(rank)) or "it did not say" for rank in late}
        return {rank: self.outcome(rank, f"{late_text}; where it stood:\n{stack}") for rank, stack in stacks.items()}

    def _stack(self, rank: int) -> Path:
        return _stack_path(self._folder, rank)

    def _reap(self, rank: int) -> int:
        """Wait for a rank's process and return its exit status."""
        status = self._statuses[rank]
        if status is None:
            status = self._statuses[rank] = os.waitpid(self.processes[rank], 0)[1]
        return status

    def outcome(self, rank: int, stack: str = "") -> ProcessOutcome:
        """Return the outcome of a rank that has ended. stack: the message if it was killed."""
        status = self._reap(rank)
        exit_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        try:
            return replace(decode_outcome(rank, self._received[rank]), exit_signal=exit_signal)
        except ValueError:
            code = os.waitstatus_to_exitcode(status)
            return ProcessOutcome(rank, None, "Died", stack or f"ended with {code} and said nothing", exit_signal)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    meanwhile: AbstractContextManager[object] | None = None,
) -> list[Any]:
    """Run `function(*arguments)` on `world_size` forked ranks, each with gloo as its default group.

    Return the results in rank order; they must be JSON values. timeout_s: then every rank is killed, and the stacks of
    its threads are in the error. meanwhile: a context entered while this process waits, such as a progress display.
    Raises RanksFailed.
    """
    waiting = nullcontext() if meanwhile is None else meanwhile
    with RankProcesses(function, world_size, *arguments, group_timeout_s=group_timeout_s) as ranks, waiting:
        outcomes = ranks.wait(timeout_s)
    if any(outcome.error or outcome.exit_signal for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def _run_rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank_and_size: tuple[int, int],
    folder_and_timeout: tuple[str, float],
    pipe: int,
) -> None:
    """Run one rank in a forked process, write its outcome to the pipe and exit; never return."""
    data = encode_outcome(partial(_rank_main, function, arguments, rank_and_size, folder_and_timeout))
    sys.stdout.flush()
    sys.stderr.flush()
    while data:
        data = data[os.write(pipe, data) :]
    os._exit(0)


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank_and_size: tuple[int, int],
    folder_and_timeout: tuple[str, float],
) -> Any:
    """Set up a rank's process and group, and call the function."""
    die_with_parent()
    folder, group_timeout_s = folder_and_timeout
    stack = _stack_path(folder, rank_and_size[0]).open("w")  # stays open: the signal handler writes to it
    faulthandler.register(_DUMP_SIGNAL, file=stack, all_threads=True)
    gc.freeze()  # never collect the parent's garbage: a gloo group among it would join threads that no fork has
    # One thread: a parent's OpenMP pool does not survive a fork, and the ranks share the cores anyway.
    torch.set_num_threads(1)
    join_group(rank_and_size, folder, group_timeout_s)
    return function(*arguments)


def join_group(rank_and_size: tuple[int, int], folder: str, timeout_s: float) -> None:
    """Initialise gloo as this rank's default group. folder: of the store."""
    rank, world_size = rank_and_size
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # a rank that ends at once must not break the connections of those still connecting


def encode_outcome(act: Callable[[], Any]) -> bytes:
    """Call `act` and encode its result or its error."""
    try:
        return json.dumps({"value": act(), "error": None, "message": ""}).encode()
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        where = "" if isinstance(error, OverweaveError) else "\n" + traceback.format_exc()
        outcome = {"value": None, "error": type(error).__name__, "message": f"{type(error).__name__}: {error}{where}"}
        return json.dumps(outcome).encode()


def decode_outcome(rank: int, answer: bytes) -> ProcessOutcome:
    """Decode what a rank has sent. Raises ValueError if that is not an outcome."""
    return ProcessOutcome(rank, exit_signal=0, **json.loads(answer))


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have a signal sent to this process when its parent ends, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder, f"stack.{rank}")


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _is_dump_complete(path: Path) -> bool:
    """Return whether a stack dump is complete: the main thread's, which ends so, comes last."""
    return _text(path).endswith("in <module>")

"""Ranks that the tests of one process share: forked once, given the functions of one test after the other.

A rank keeps what it has imported, compiled and proven. For every use it gets a group, an environment and random numbers
anew. It does not see what a test has patched in its own process: such a test, and one whose ranks are signalled or
leave before their peers, forks its own ranks by `overweave.runtime.host.processes`. So does `run_ranks` here with what
no other process can be sent, such as a kernel that the test has compiled.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overweave.runtime.host import processes
from overweave.runtime.host.processes import (
    ProcessOutcome,
    RankProcesses,
    RanksFailed,
    decode_outcome,
    encode_outcome,
    join_group,
)
from tests.registries import kept_registries

MOST_RANKS = 8
START_S = 60.0


class Task(NamedTuple):
    """A function for some ranks. folder: where they meet. environment: of the process that asks."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    folder: str
    group_timeout_s: float
    environment: dict[str, str]

    def run(self, rank: int) -> Any:
        """What the function returns on a rank of a group that is gone afterwards."""
        os.environ.clear()
        os.environ.update(self.environment)
        random.seed(0)
        torch.manual_seed(0)
        join_group((rank, self.world_size), self.folder, self.group_timeout_s)
        try:
            with kept_registries():
                return self.function(*self.arguments)
        finally:
            _leave()


class Pool:
    """Ranks that wait for tasks. A context manager: on leaving, all processes are gone."""

    def __init__(self) -> None:
        pairs = [Pipe() for _ in range(MOST_RANKS)]
        self._pipes = [ours for ours, _ in pairs]
        self._ranks = RankProcesses(_serve, MOST_RANKS, pairs, group_timeout_s=START_S)
        for _, theirs in pairs:
            theirs.close()

    def close(self) -> None:
        """Ends all processes."""
        self._ranks.__exit__(None, None, None)
        for pipe in self._pipes:
            pipe.close()

    def outcomes(self, task: bytes, world_size: int, timeout_s: float) -> list[ProcessOutcome]:
        """How a task ended on each rank. Those that have not answered by then are killed, and tell where they stood."""
        pipes = self._pipes[:world_size]
        for pipe in pipes:
            pipe.send_bytes(task)
        end_s = time.monotonic() + timeout_s
        found: dict[int, ProcessOutcome] = {}
        silent = {pipe: rank for rank, pipe in enumerate(pipes)}
        while silent and (left_s := end_s - time.monotonic()) > 0:
            for pipe in wait(list(silent), left_s):
                rank = silent.pop(pipe)
                try:
                    found[rank] = decode_outcome(rank, pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    found[rank] = self._ranks.outcome(rank)
        found |= self._ranks.end(list(silent.values()), timeout_s)
        return [found[rank] for rank in range(world_size)]


_POOLS: list[Pool] = []  # one at most


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
) -> list[Any]:
    """`function(*arguments)` on ranks of the pool, as overweave's `run_ranks` does on new ones. Raises RanksFailed.

    Ranks that failed are not used again.
    """
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        task = Task(function, arguments, world_size, folder, group_timeout_s, dict(os.environ))
        try:
            sent = pickle.dumps(task)
        except (pickle.PicklingError, AttributeError, TypeError):
            times = {"timeout_s": timeout_s, "group_timeout_s": group_timeout_s}
            return processes.run_ranks(function, world_size, *arguments, **times)
        if not _POOLS:
            _POOLS.append(Pool())
        outcomes = _POOLS[0].outcomes(sent, world_size, timeout_s)
    if any(outcome.error or outcome.exit_signal for outcome in outcomes):
        close()
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


@atexit.register
def close() -> None:
    """Ends the pool, if there is one."""
    while _POOLS:
        _POOLS.pop().close()


def _serve(pairs: list[tuple[Connection, Connection]]) -> None:
    """What a rank of the pool does until it is killed."""
    rank = dist.get_rank()
    _leave()
    for other, (theirs, own) in enumerate(pairs):
        theirs.close()
        if other != rank:
            own.close()
    pipe = pairs[rank][1]
    while True:
        task: Task = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(encode_outcome(partial(task.run, rank)))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()

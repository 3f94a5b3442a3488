"""Collectives of torch.distributed inside calls of ours: no rank waits in one for a peer that has given up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overweave.compat.torch_names import reduce_scatter_single
from overweave.errors import OverweaveError
from overweave.memory.board.board import PROBE_EVERY_S, Board
from overweave.memory.group import Group

Collective = Callable[..., dist.Work | None]
_SLICE = timedelta(seconds=PROBE_EVERY_S)


def run_collective(group: Group, collective: Collective, *operands: Any) -> None:
    """Runs `collective(*operands)` in the group: over when this returns for tensors on the CPU, else launched.

    Raises a peer's alarm, PeerDied, or PeerError for what the library raised. The library then still holds operands on
    the CPU, and the group runs no more collectives.
    """
    board, is_awaited = Board.of(group), operands[0].is_cpu
    try:
        work = collective(*operands, group=group.process_group, async_op=is_awaited)
        if is_awaited and work is not None:
            _await(work, board)
    except RuntimeError as error:
        name = getattr(collective, "__name__", "a collective")
        raise error if isinstance(error, OverweaveError) else board.root_cause(error, name) from error


def run_reduce_scatter(group: Group, total: torch.Tensor, parts: torch.Tensor) -> None:
    """Adds this rank's part of all ranks' `parts`, one part below the other, into `total`. As `run_collective`.

    On the CPU by what gloo's own reduce_scatter is, an all_reduce and a copy: that never reports its end, and waits for
    it without a bound.
    """
    if not parts.is_cpu:
        run_collective(group, reduce_scatter_single, total, parts)
        return
    sums = parts.clone()
    run_collective(group, dist.all_reduce, sums)
    total.copy_(sums[group.rank * total.shape[0] :][: total.shape[0]])


def _await(work: dist.Work, board: Board) -> None:
    """Waits in slices, between which peers are looked at. Raises what the library and they raise."""
    while not work.is_completed():
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if not work.is_completed():  # a slice is over
                board.check()
    work.wait()

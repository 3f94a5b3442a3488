"""What a caller may do with a group's workspace: check it, reset it, allocate in it, and ask how far it reaches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.memory.board.board import Board
from overweave.memory.board.islands import Islands
from overweave.memory.group import Group
from overweave.memory.host.workspace import HostWorkspace
from overweave.ops.call.devices import current, own_device
from overweave.ops.call.groups import GroupLike, group_of, refuse
from overweave.ops.call.prepared import CALLS
from overweave.runtime.backends import load

POLL_EVERY_S = 1e-3


def islands(group: GroupLike = None) -> Islands:
    """The ranks of a group that can map each other's memory, island by island; print it to read them.

    `members`: the ranks of each island, `hosts`: of each rank the name of its host. Ranks of one host, of one user and
    in one container are an island. Between islands rows travel by the library's collectives alone: plans that read or
    write the memory of all peers are not chosen there, and refused where they are asked for; `islands`, which every
    operator has, reads and writes that of its island.
    Collective at the first call of a group. OVERWEAVE_ISLAND in the environment of ranks parts those whose names
    differ, wherever they run.
    Raises GroupError for ranks with other versions of the software, MachineError, PeerDied, PeerTimeout.
    """
    return Board.of(group_of(group)).islands


def check(group: GroupLike = None) -> None:
    """Waits for this rank's calls to end, and raises what went wrong in any of them. Their results are void then.

    Raises PeerDied, PeerTimeout or RankMismatch of a call, WorkspaceBroken until a reset, GroupError without a group.
    """
    resolved = group_of(group)
    workspace = _on_gpu(resolved)
    if workspace is not None:
        with current(workspace.device):
            workspace.check()
        return
    board = Board.existing(resolved)
    if torch.cuda.is_available():  # only library plans have run, or plans on the CPU
        _await_gpu(board)
    if board is not None:  # else nothing has run
        board.check()


def reset(group: GroupLike = None) -> None:
    """Collective: makes the group usable again after PeerTimeout or RankMismatch, once every rank has come here.

    Not where a rank left a library's collective half done (the plan `sequential`, say): the library takes the next one
    for the rest of it, or has closed its connections. Then destroy the process group, and make a new one.
    """
    resolved = group_of(group)
    with resolved.lock:
        workspace, host = _on_gpu(resolved), HostWorkspace.existing(resolved)
        if workspace is not None:
            with current(workspace.device):
                workspace.reset()
        else:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            Board.of(resolved).reset(lambda: None)
        if host is not None:
            host.reset_local()


def symmetric_empty(
    shape: Sequence[int], dtype: torch.dtype, group: GroupLike = None, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor of zeros that every GPU of the group can address: peers read it without a staged copy.

    Collective: all ranks allocate the same shape and dtype, in the same order. The operators read any input in place
    and stage nothing when they push, so they run no faster with it; it is for kernels of your own that read a peer's
    tensor. On a CPU it is an ordinary tensor.
    Raises InputError for a shape or dtype that is none, RankMismatch where ranks differ, MachineError without peer
    access.
    """
    resolved = group_of(group)
    if not _is_shape(shape) or not isinstance(dtype, torch.dtype):
        error = InputError("symmetric_empty", f"shape {shape}, dtype {dtype}", "Pass ints >= 0 and a torch.dtype")
        raise refuse(resolved, error)
    with resolved.lock:
        extents, board = tuple(shape), Board.of(resolved)
        board.agree(f"symmetric_empty {list(extents)} {dtype}".encode())
        where = device or own_device()
        if where.type == "cpu":
            if not board.is_watched:
                board.finish()
            return torch.zeros(extents, dtype=dtype, device=where)
        size_bytes = max(dtype.itemsize * torch.Size(extents).numel(), 16)
        with current(where):
            heap = load("gpu heap")(resolved, where, size_bytes)
            tensor: torch.Tensor = heap.view(0, extents, dtype)
        return tensor


class MemoryReport(NamedTuple):
    """What a group keeps on this rank beside tensors of the caller's, in bytes.

    symmetric_bytes: memory that peers write to, one piece for all calls, as large as the largest needs; pieces that
    were outgrown stay as long as plans or graphs know them. calls: signatures that were prepared, of operators and of
    authors' kernels.
    """

    symmetric_bytes: int
    calls: int


def memory_report(group: GroupLike = None) -> MemoryReport:
    """The memory that calls on a group hold, on this rank. All layers of the group share one piece of it."""
    resolved = group_of(group)
    spaces = (_on_gpu(resolved), HostWorkspace.existing(resolved))
    calls = CALLS.get(resolved.process_group)
    return MemoryReport(sum(each.size_bytes for each in spaces if each is not None), len(calls or ()))


def _await_gpu(board: Board | None) -> None:
    """Waits for this GPU. Between islands a peer may be lost meanwhile, whom a collective would wait for: it raises."""
    if board is None or board.islands.is_one:
        torch.cuda.synchronize()
        return
    ended = torch.cuda.Event()
    ended.record()
    while not ended.query():
        board.check_periodically()
        time.sleep(POLL_EVERY_S)


def _is_shape(shape: object) -> bool:
    return isinstance(shape, Sequence) and all(isinstance(extent, int) and extent >= 0 for extent in shape)


def _on_gpu(group: Group) -> Any:
    """The group's workspace on this rank's GPU; None without a GPU, and where nothing has needed one."""
    return load("gpu workspace").existing(group) if torch.cuda.is_available() else None

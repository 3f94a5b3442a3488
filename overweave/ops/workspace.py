"""What a caller may do with a group's workspace: check it, reset it after a failure, allocate tensors in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overweave.errors import InputError
from overweave.memory.board import Board
from overweave.memory.host_workspace import HostWorkspace
from overweave.ops.dispatch import GroupLike, group_of, refuse
from overweave.runtime.backends import load
from overweave.runtime.host import reset_host


def check(group: GroupLike = None) -> None:
    """Waits for this rank's calls to end, and raises what went wrong in any of them. Their results are void then.

    Raises PeerDied, PeerTimeout or RankMismatch of a call, WorkspaceBroken until a reset, GroupError without a group.
    """
    resolved = group_of(group)
    if not torch.cuda.is_available():
        HostWorkspace.of(resolved).board.check()
        return
    workspace = load("gpu workspace").opened(resolved, _gpu())
    if workspace is not None:
        workspace.check()
    else:  # only library plans have run
        torch.cuda.synchronize()
        Board.of(resolved).check()


def reset(group: GroupLike = None) -> None:
    """Collective: makes the group usable again after PeerTimeout or RankMismatch, once every rank has come here."""
    resolved = group_of(group)
    if torch.cuda.is_available():
        load("gpu workspace").of(resolved, _gpu()).reset()
    else:
        reset_host(resolved)


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
    extents, board = tuple(shape), Board.of(resolved)
    board.agree(f"symmetric_empty {list(extents)} {dtype}".encode())
    if not torch.cuda.is_available():
        board.finish()
        return torch.zeros(extents, dtype=dtype)
    where = device or _gpu()
    size_bytes = max(dtype.itemsize * torch.Size(extents).numel(), 16)
    heap = load("gpu heap")(resolved, where, size_bytes)
    tensor: torch.Tensor = heap.view(0, extents, dtype)
    return tensor


def _is_shape(shape: object) -> bool:
    return isinstance(shape, Sequence) and all(isinstance(extent, int) and extent >= 0 for extent in shape)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())

"""Peer access: whether the GPUs of a process, or of a group, can address each other's memory."""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from overweave.memory.board.board import Board
from overweave.memory.group import Group

YES, NO = b"yes", b"no"
_AGREED: WeakKeyDictionary[ProcessGroup, dict[torch.device, bool]] = WeakKeyDictionary()
atexit.register(_AGREED.clear)  # a process group must not outlive the interpreter


@lru_cache
def has_peer_access(device: torch.device) -> bool:
    """Return whether a GPU and every other one that this process sees have peer access; True if it sees one alone."""
    return can_access_peers(_index(device), range(torch.cuda.device_count()))


def group_has_peer_access(group: Group, device: torch.device) -> bool:
    """Return whether all GPUs of a group have peer access, the same on every rank. The first call is collective.

    Each rank checks its own GPU against those of its peers that it sees; one no decides. Raises RankMismatch on every
    rank if one makes another call, and PeerError.
    """
    if group.world_size == 1:
        return True
    known = _AGREED.setdefault(group.process_group, {})
    if device not in known:
        board = Board.of(group)
        board.agree(b"what memory the GPUs of the group reach")
        uuids = board.all_gather_bytes(_uuid(_index(device)))
        peers = [index for index in range(torch.cuda.device_count()) if _uuid(index) in uuids]
        known[device] = NO not in board.all_gather_bytes(YES if can_access_peers(_index(device), peers) else NO)
    return known[device]


def can_access_peers(own: int, others: Iterable[int]) -> bool:
    """Return whether a GPU has peer access to all others, and they to it."""
    can_access = torch.cuda.can_device_access_peer
    return all(can_access(own, other) and can_access(other, own) for other in others if other != own)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _uuid(index: int) -> bytes:
    """Return a GPU's UUID, the same in all processes, whatever its index there."""
    return str(torch.cuda.get_device_properties(index).uuid).encode()

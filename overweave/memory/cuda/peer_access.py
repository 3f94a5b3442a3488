"""Whether GPUs read and write each other's memory: those that a process sees, and those of a group."""

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
    """Whether a GPU reaches every other one that this process sees, and they reach it. Of one GPU nothing is known, and
    yes is said.
    """
    return reaches(_index(device), range(torch.cuda.device_count()))


def agreed_peer_access(group: Group, device: torch.device) -> bool:
    """Whether all GPUs of a group reach each other's memory: each rank says what it knows of its own and of those of
    its peers that it sees, and one no stands for all. The first call is collective; later ones look nowhere.

    Raises RankMismatch on every rank if one makes another call, and PeerError.
    """
    if group.world_size == 1:
        return True
    known = _AGREED.setdefault(group.process_group, {})
    if device not in known:
        board = Board.of(group)
        board.agree(b"what memory the GPUs of the group reach")
        named = board.exchange(_name(_index(device)))
        peers = [index for index in range(torch.cuda.device_count()) if _name(index) in named]
        known[device] = NO not in board.exchange(YES if reaches(_index(device), peers) else NO)
    return known[device]


def reaches(own: int, others: Iterable[int]) -> bool:
    """Whether a GPU addresses all of some others, and they address it."""
    reach = torch.cuda.can_device_access_peer
    return all(reach(own, other) and reach(other, own) for other in others if other != own)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _name(index: int) -> bytes:
    """A GPU's, whichever number processes give it."""
    return str(torch.cuda.get_device_properties(index).uuid).encode()

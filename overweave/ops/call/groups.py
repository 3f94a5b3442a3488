"""The group that a caller means, remembered; and how its ranks learn that one of them cannot take part."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from msgspec.structs import replace

from overweave.errors import GroupError, OverweaveError
from overweave.ir.problem import Problem
from overweave.memory.board.board import REFUSED, Board
from overweave.memory.group import LIVE_GROUPS, Group, process_group_of, resolve
from overweave.memory.group import GroupLike as GroupLike
from overweave.ops.call.prepared import CALLS

ErrorT = TypeVar("ErrorT", bound=Exception)
_NAMED: dict[object, dist.ProcessGroup] = {}  # what ops of torch, whose groups are names, were called with
_GROUPS: dict[dist.ProcessGroup, Group] = {}
atexit.register(lambda: _GROUPS.clear())  # a process group must not outlive the interpreter
atexit.register(_NAMED.clear)
_MEETING = threading.Lock()  # threads may be new to groups at once
_INHERITED: list[object] = []  # groups of a process that this one was forked from, and what was kept for them


def group_of(group: GroupLike) -> Group:
    """What the caller means by `group`, remembered. Raises GroupError."""
    key = dist.group.WORLD if group is None else _NAMED.get(group) if group.__class__ is str else group
    if not isinstance(key, dist.ProcessGroup) or key not in LIVE_GROUPS:
        key = process_group_of(group)
        if isinstance(group, str):
            _NAMED[group] = key
    known = _GROUPS.get(key)
    if known is None or key not in LIVE_GROUPS:
        known = _met(key)
    return known


def _met(process_group: dist.ProcessGroup) -> Group:
    """A group that is new to us. What was kept for groups that have been destroyed since goes."""
    if process_group in _INHERITED:
        found, cure = "this process was forked from the rank that made it", "Start ranks before they make groups"
        raise GroupError("compute in the group that was passed", found, cure)
    with _MEETING:
        for known in [known for known in _GROUPS if known not in LIVE_GROUPS]:
            del _GROUPS[known]
            for name in [name for name, named in _NAMED.items() if named is known]:
                del _NAMED[name]
            if known in CALLS and CALLS[known].close():
                del CALLS[known]
        if process_group not in _GROUPS:
            _GROUPS[process_group] = resolve(process_group)
        return _GROUPS[process_group]


def _leave_to_parent() -> None:
    """In a forked process: a call there would speak in its parent's name. Kept, as threads of theirs end with them."""
    global _GROUPS, _MEETING
    _INHERITED.extend([*LIVE_GROUPS, *_GROUPS, _GROUPS])
    _NAMED.clear()
    _GROUPS, _MEETING = {}, threading.Lock()  # another thread may have held that, and is not here


os.register_at_fork(after_in_child=_leave_to_parent)


def on_islands(problem: Problem, group: Group) -> Problem:
    """The problem as the ranks of a group have it, which may lie on several islands. The first call is collective."""
    islands = Board.of(group).islands
    return problem if islands.is_one else replace(problem, islands=islands.members)


def refuse(group: Group, error: ErrorT) -> ErrorT:
    """Tells the peers, who are about to agree on this call, that this rank cannot take part; the error to raise."""
    with suppress(OverweaveError):
        board = Board.of(group)
        board.agree(f"{REFUSED}{error}".encode())
        if not board.is_watched:
            board.finish()  # no workspace whose end says so
    return error

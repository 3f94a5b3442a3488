"""Agreement of a group's ranks on measurements: they compare theirs before their first choice.

Each group stores what its ranks agreed on. So a cache that changes on disk, or a tuning in another group, cannot make
them choose differently later.
"""

from __future__ import annotations

import atexit
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from overweave.errors import RankMismatch
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import knowledge, path_of
from overweave.tuner.store.table import Entry, Knowledge

_AGREED: WeakKeyDictionary[ProcessGroup, dict[tuple[Target, str], Knowledge]] = WeakKeyDictionary()
atexit.register(_AGREED.clear)  # a process group must not outlive the interpreter


def agreed_knowledge(group: Group, target: Target, operator: str) -> Knowledge:
    """Return the measurements of an operator that a group's ranks agree on. The first call is collective; later ones
    are not. Raises RankMismatch on every rank if their measurements differ, and PeerError."""
    agreed = _AGREED.setdefault(group.process_group, {})
    if (target, operator) not in agreed:
        own = knowledge(target, group.world_size, operator)
        _agree(group, own, operator)
        agreed[target, operator] = own
    return agreed[target, operator]


def learn(group: Group, target: Target, entry: Entry) -> None:
    """Add an entry to a group's measurements. Every rank passes the same entry."""
    operator = entry.problem.operator
    agreed = agreed_knowledge(group, target, operator)
    _AGREED[group.process_group][target, operator] = Knowledge(agreed.own.with_entries((entry,)), agreed.shipped)


def _agree(group: Group, own: Knowledge, operator: str) -> None:
    """Compare measurements over the ranks. Raises RankMismatch with a cure."""
    path = path_of(own.own.fingerprint)
    count = len(own.own.entries)
    subject = f"a plan of {operator} chosen by what was measured"
    signature = f"{subject}, {count} {'problem' if count == 1 else 'problems'} in {path.name} ({own.digest})"
    try:
        Board.of(group).agree(signature.encode())
    except RankMismatch as error:
        if error.found.count(subject) < 2:
            raise  # one rank asks for something else altogether
        cure = (
            f"Mount one cache folder for every rank (OVERWEAVE_CACHE_DIR), or delete {path} wherever a rank reads one"
        )
        raise RankMismatch("choose one plan on every rank", error.found, cure) from None

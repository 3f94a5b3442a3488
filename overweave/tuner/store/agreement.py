"""One knowledge for all ranks of a group: they compare what they know before they first choose by it.

Each group keeps what its ranks agreed on, so that a cache which changes on disk, or a tuning in another group, cannot
make them choose differently later on.
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
    """What the ranks of a group know of an operator together. The first call is collective; later ones look nowhere.

    Raises RankMismatch on every rank if one knows other measurements, and PeerError.
    """
    known = _AGREED.setdefault(group.process_group, {})
    if (target, operator) not in known:
        own = knowledge(target, group.world_size, operator)
        _agree(group, own, operator)
        known[target, operator] = own
    return known[target, operator]


def learn(group: Group, target: Target, entry: Entry) -> None:
    """From now on the group knows this entry, too. Every rank calls it with the same entry."""
    operator = entry.problem.operator
    known = agreed_knowledge(group, target, operator)
    _AGREED[group.process_group][target, operator] = Knowledge(known.own.with_entries((entry,)), known.shipped)


def _agree(group: Group, own: Knowledge, operator: str) -> None:
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

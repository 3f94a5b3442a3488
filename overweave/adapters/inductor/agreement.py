"""Agreement of a group's ranks on what the pass fused: they compare digests once for each graph.

A graph knows its own rank's program alone. A rank that runs a graph for the first time writes its digest into the
group's store, and waits for those of its peers there. Where one rank decided otherwise, or has not come after half of
the group's timeout (it may run no compiled graph at all), none of them fuses that graph or a new one of this group any
more. The first rank to decide sets one key of the store (compare_set), which is the verdict for all ranks.
"""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup, Store

from overweave.adapters.report import site
from overweave.compat.torch_names import get_process_group_store
from overweave.errors import RankMismatch
from overweave.memory.group import LIVE_GROUPS, Group, collective_failure
from overweave.ops.call.groups import group_of

SITE = "compiled graphs"
REORDERED = "!"  # behind decisions: collectives come in another order than in the program
_ALIKE, _APART, _VOID = "alike", "apart", "void"
_SHARE_OF_TIMEOUT = 0.5  # a peer that waits in a collective of torch's for this rank must not run into its timeout
_PAUSES_S = 0.001, 0.05


@dataclass
class _Agreed:
    """The verdicts of a group. words: digest -> verdict. count: comparisons so far. is_over: ranks differed, so
    no graph is compared any more."""

    words: dict[str, str] = field(default_factory=dict)
    count: int = 0
    is_over: bool = False


_AGREED: dict[ProcessGroup, _Agreed] = {}  # every call of a graph asks: no weak keys
atexit.register(_AGREED.clear)  # a process group must not outlive the interpreter


def is_agreed(group_name: str, decisions: str) -> bool:
    """Return whether all ranks of a group run graphs with this digest, so that fused nodes may run fused.

    The first call for a graph waits for all ranks, half of the group's timeout at most. Raises RankMismatch on every
    rank where they differ and one of them cannot call torch's collectives in the program's order any more.
    """
    group = group_of(group_name)
    agreed = _AGREED.get(group.process_group)
    word = agreed.words.get(decisions) if agreed is not None else None
    if word is None:
        with group.lock:
            word = _verdict(group, _of(group.process_group), decisions)
    if word == _VOID:
        found = "they have other collectives, or other matmuls beside these, and collectives were moved past each other"
        asked = f"run graphs that are alike on all ranks of group {group_name}"
        raise RankMismatch(asked, found, "Leave graphs=True out of install()")
    return word == _ALIKE


def _of(process_group: ProcessGroup) -> _Agreed:
    for known in [known for known in _AGREED if known not in LIVE_GROUPS]:
        del _AGREED[known]
    return _AGREED.setdefault(process_group, _Agreed())


def _verdict(group: Group, agreed: _Agreed, decisions: str) -> str:
    word = agreed.words.get(decisions)
    if word is None and group.world_size == 1:
        word = _ALIKE
    elif word is None and agreed.is_over:
        word = _VOID if decisions.endswith(REORDERED) else _APART
    elif word is None:
        agreed.count += 1
        word = _compared(group, f"overweave/graphs/{agreed.count}", decisions)
        agreed.is_over = word != _ALIKE
    agreed.words[decisions] = word
    if word != _ALIKE:
        site(SITE).by_torch["ranks have other graphs"] += 1
    return word


def _compared(group: Group, place: str, decisions: str) -> str:
    """Return the verdict of one comparison: that of the rank that decided first."""
    store: Store = get_process_group_store(group.process_group)
    try:
        store.set(f"{place}/{group.rank}", decisions)
        word = _own_verdict(store, group, place, decisions)
        return bytes(store.compare_set(f"{place}/word", "", word)).decode()
    except RuntimeError as error:
        raise collective_failure(group, error) from error


def _own_verdict(store: Store, group: Group, place: str, decisions: str) -> str:
    """Wait for the digests of all ranks, for a limited time; return this rank's verdict."""
    waiting = [rank for rank in range(group.world_size) if rank != group.rank]
    digests, pause_s = {decisions}, _PAUSES_S[0]
    end_s = time.monotonic() + group.timeout_s * _SHARE_OF_TIMEOUT
    while waiting and time.monotonic() < end_s:
        here = [rank for rank in waiting if store.check([f"{place}/{rank}"])]
        digests |= {bytes(store.get(f"{place}/{rank}")).decode() for rank in here}
        waiting = [rank for rank in waiting if rank not in here]
        if waiting and store.check([f"{place}/word"]):
            return _APART  # any value: compare_set returns the verdict that is set
        if waiting:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
    if len(digests) == 1 and not waiting:
        return _ALIKE
    return _VOID if any(digest.endswith(REORDERED) for digest in digests) else _APART

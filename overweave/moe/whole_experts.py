"""Ranks that hold whole experts: whether all of them have each expert once."""

from __future__ import annotations

import struct

import torch

from overweave.errors import InputError
from overweave.memory.board.board import Board
from overweave.memory.group import OfGroup
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.collectives import Exchange, agreed

_WORDS = struct.Struct("<qq")
_COUNTED: OfGroup[dict[str, int]] = OfGroup()


def count_experts(exchange: Exchange, first: int, own: int) -> int | None:
    """How many experts all ranks hold. first, own: the number of this rank's first one, and how many it holds.

    Ranks tell each other when a call in these words is first made. None: a compiler looks at the call. Raises
    InputError on all ranks if experts of a rank do not follow those of the ranks before it.
    """
    if torch.compiler.is_compiling():
        return None
    group = group_of(exchange.place.name)
    counted = _COUNTED.setdefault(group.process_group, {})
    if exchange.told not in counted:
        words = _WORDS.pack(first, own)
        told = f"{exchange.told}: which experts ranks hold"
        spans = agreed(exchange.place.name, told, lambda group: Board.of(group).all_gather_bytes(words))
        counted[exchange.told] = _total([_WORDS.unpack(each) for each in spans])
    return counted[exchange.told]


def _total(spans: list[tuple[int, int]]) -> int:
    total = 0
    for rank, (first, own) in sorted(enumerate(spans), key=lambda each: each[1]):
        if own and first != total:
            found = f"rank {rank} holds {own} from expert {first} on, ranks before it hold {total}"
            raise InputError("experts that ranks hold whole", found, "Pass first= as the number of experts before them")
        total += own
    return total

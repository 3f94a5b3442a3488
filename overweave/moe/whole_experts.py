"""Ranks that hold whole experts: whether all of them have each expert once."""

from __future__ import annotations

import struct

import torch

from overweave.errors import InputError
from overweave.memory.board.board import Board
from overweave.moe.overlapped import check_ids
from overweave.ops.dispatch.collectives import Exchange, agreed

_WORDS = struct.Struct("<qq")


def check_whole(exchange: Exchange, ids: torch.Tensor, first: int, own: int) -> None:
    """On a CPU, where ranks tell each other in each call which experts they hold: from `first` on, so many. Raises
    InputError on all ranks if experts of a rank do not follow those of the ranks before it, or ids are no expert's."""
    if ids.is_cuda or torch.compiler.is_compiling():
        return
    words, told = _WORDS.pack(first, own), f"{exchange.told}: which experts ranks hold"
    spans = agreed(exchange.place.name, told, lambda group: Board.of(group).all_gather_bytes(words))
    check_ids(exchange.place.name, ids, _total([_WORDS.unpack(each) for each in spans]))


def _total(spans: list[tuple[int, int]]) -> int:
    total = 0
    for rank, (first, own) in sorted(enumerate(spans), key=lambda each: each[1]):
        if own and first != total:
            found = f"rank {rank} holds {own} from expert {first} on, ranks before it hold {total}"
            raise InputError("experts that ranks hold whole", found, "Pass first= as the number of experts before them")
        total += own
    return total

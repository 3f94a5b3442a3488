"""All-gathers of row shards by method: lists of chunk moves, or one kernel's packed messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from overweave.schedules.back_ends import PUSHES
from overweave.schedules.behind_tiles import in_parts
from overweave.schedules.chunked_gather import chunked_gather
from overweave.schedules.communication import Communication, Split
from overweave.schedules.gather_packed import gather_packed
from overweave.schedules.gather_templates import TEMPLATES, gather_moves
from overweave.schedules.mesh import mesh_of
from overweave.schedules.options import Settings

Gathered = Callable[[Split, int, Settings, bool], Communication]


def all_gather(
    split: Split, cols: int, method: str, settings: Settings, returns_gathered: bool = False
) -> Communication:
    """The all-gather of `[split.rows, cols]` by `method`, with a `Chunk` where each part that arrives may be used.

    returns_gathered: once all has arrived it is in output `gathered_out`, too.
    """
    return METHODS[method](split, cols, settings, returns_gathered)


def _by_moves(template: str, split: Split, cols: int, settings: Settings, returns_gathered: bool) -> Communication:
    gather = gather_moves(template, mesh_of(split, cols, settings))
    return in_parts(chunked_gather(gather, split.rows, cols, returns_gathered), {PUSHES: split.tile_rows})


def _packed(split: Split, cols: int, settings: Settings, returns_gathered: bool) -> Communication:
    if split.world_size == 1:
        return _by_moves("collective", split, cols, settings, returns_gathered)
    return gather_packed(split, cols, returns_gathered)


METHODS: dict[str, Gathered] = {name: partial(_by_moves, name) for name in TEMPLATES} | {"packed": _packed}

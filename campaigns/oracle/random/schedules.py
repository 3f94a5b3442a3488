"""Random schedules that are right by construction: the ground that verify's campaigns stand on.

Each template draws shapes (uneven and empty shards too), orders, queues and tile counts, and is filled with as many
pieces as are asked for. Two ranks at least.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec import Struct

from campaigns.oracle.random.chunks import chunked
from campaigns.oracle.random.endings import finished_sums
from campaigns.oracle.random.exchanges import exchanged
from campaigns.oracle.random.gathers import collectives, gather, gather_by_turns, gather_columns, into_outputs
from campaigns.oracle.random.sums import add_in_any_order, add_in_turn, ring, scatter, scatter_into_tiles
from campaigns.oracle.random.totals import all_reduces, read_everywhere, stored_at_peers
from campaigns.oracle.random.waves import exchanged_waves, waves
from overweave.ir.schedule import Schedule


class Template(Struct, frozen=True):
    """per_piece: about how many operations one more piece adds, for so many ranks."""

    make: Callable[[Random, int, int], Schedule]
    per_piece: Callable[[int], int]


TEMPLATES = (
    Template(gather, lambda ranks: 2 * ranks * (ranks - 1)),
    Template(gather_columns, lambda ranks: 2 * ranks * ranks - ranks),
    Template(gather_by_turns, lambda ranks: 3 * ranks),
    Template(collectives, lambda ranks: 2 * ranks),
    Template(chunked, lambda ranks: 2 * ranks * (ranks - 1)),
    Template(into_outputs, lambda ranks: 2 * ranks * (ranks - 1)),
    Template(scatter, lambda ranks: 2 * ranks * ranks),
    Template(scatter_into_tiles, lambda ranks: 2 * ranks * ranks - ranks),
    Template(ring, lambda ranks: 3 * ranks * ranks - 2 * ranks),
    Template(add_in_turn, lambda ranks: 2 * ranks * ranks),
    Template(add_in_any_order, lambda ranks: 2 * ranks * ranks),
    Template(finished_sums, lambda ranks: 2 * ranks * ranks),
    Template(all_reduces, lambda ranks: 2 * ranks),
    Template(read_everywhere, lambda ranks: 3 * ranks),
    Template(stored_at_peers, lambda ranks: 2 * ranks * ranks),
    Template(waves, lambda ranks: ranks * ranks + 2 * ranks),
    Template(exchanged_waves, lambda ranks: ranks * ranks + 2 * ranks),
    Template(exchanged, lambda ranks: 3 * ranks * ranks),
)


def random_schedule(rng: Random, ranks: int, operations: int) -> Schedule:
    """A right schedule of about so many operations, or a little more, on so many ranks."""
    template = rng.choice(TEMPLATES)
    return template.make(rng, ranks, max(1, -(-operations // template.per_piece(ranks))))

"""What a list of moves leaves to the library to sum, behind the tiles and behind all else that a rank moves or adds."""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Collective, Range, Region
from overweave.schedules.communication import MAIN, PARTIAL, Y, is_empty, shifted
from overweave.schedules.moves.provenance import Provenance


def results_together(provenance: Provenance, rank: int) -> Iterator[tuple[Range, Region]]:
    """The rows of the tensor that the library sums for a rank, and where they are in its result."""
    first = provenance.wanted(rank).rows[0]
    for at in provenance.together:
        for rows in _wanted(provenance, rank, at):
            if not is_empty(rows):
                yield rows, Region(Y, rank, shifted(rows, -first), provenance.whole.cols)


def summed_together(provenance: Provenance, rank: int) -> Iterator[Collective]:
    """A rank's parts of the library's calls: each shard's rows to its rank, or, everywhere, one call for each."""
    cols, first = provenance.whole.cols, provenance.wanted(rank).rows[0]
    is_everywhere = provenance.reduction.everywhere
    for at, together in provenance.together.items():
        for number, rows in enumerate(_wanted(provenance, rank, at)):
            sources = (rows,) if is_everywhere else together
            if all(map(is_empty, sources)):
                continue
            function = "all_reduce" if is_everywhere else "reduce_scatter"
            yield Collective(
                name=f"{function}.{rank}.{at}.{number}",
                rank=rank,
                queue=MAIN,
                function="all_reduce" if is_everywhere else "reduce_scatter",
                label=f"{function}.{at}.{number}",
                ranks=tuple(range(provenance.reduction.world_size)),
                sources=tuple(Region(PARTIAL, rank, one, cols) for one in sources),
                destinations=(Region(Y, rank, shifted(rows, -first), cols),),
            )


def _wanted(provenance: Provenance, rank: int, at: int) -> tuple[Range, ...]:
    """Of the rows of all shards, those that a rank wants: its own, or all."""
    together = provenance.together[at]
    return together if provenance.reduction.everywhere else (together[rank],)

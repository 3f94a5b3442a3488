"""What a list of moves leaves to the library to sum, behind the tiles and behind all else that a rank moves or adds."""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.schedule import Collective, Range, Region
from overweave.schedules.communication import MAIN, PARTIAL, Y, is_empty, shifted
from overweave.schedules.held_sums import Books


def results_together(books: Books, rank: int) -> Iterator[tuple[Range, Region]]:
    """The rows of the tensor that the library sums for a rank, and where they are in its result."""
    first = books.wanted(rank).rows[0]
    for at in books.together:
        for rows in _wanted(books, rank, at):
            if not is_empty(rows):
                yield rows, Region(Y, rank, shifted(rows, -first), books.whole.cols)


def summed_together(books: Books, rank: int) -> Iterator[Collective]:
    """A rank's parts of the library's calls: each shard's rows to its rank, or, everywhere, one call for each."""
    cols, first = books.whole.cols, books.wanted(rank).rows[0]
    is_everywhere = books.reduction.everywhere
    for at, together in books.together.items():
        for number, rows in enumerate(_wanted(books, rank, at)):
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
                ranks=tuple(range(books.reduction.world_size)),
                sources=tuple(Region(PARTIAL, rank, one, cols) for one in sources),
                destinations=(Region(Y, rank, shifted(rows, -first), cols),),
            )


def _wanted(books: Books, rank: int, at: int) -> tuple[Range, ...]:
    """Of the rows of all shards, those that a rank wants: its own, or all."""
    together = books.together[at]
    return together if books.reduction.everywhere else (together[rank],)

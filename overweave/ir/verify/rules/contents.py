"""The contents of one rank's instance of a buffer while operations are followed: disjoint fragments and
their writers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from overweave.ir.schedule import Region
from overweave.ir.verify.rules.happens_before import NONE
from overweave.ir.verify.rules.values import RETIRED, RegionValue, ValuePiece, merge_pieces
from overweave.ir.verify.rules.verdict import WorkBudget

# Limit of visited bands and fragments: a constant, and some for each region that is read or written.
MOST_STEPS = 1_000_000
MOST_STEPS_OF_A_REGION = 16


class Fragment:
    """Rows `[r0, r1)`, columns `[c0, c1)`, and the value of its first element.

    writer: position of the operation that wrote it last, None if the buffer held it at the start. readers: the set of
    operations that read that value. adders: the set of those that added in any order. start: the set of those that must
    have completed before any adder.
    """

    __slots__ = ("adders", "c0", "c1", "piece", "r0", "r1", "readers", "start", "writer")

    def __init__(self, rows: tuple[int, int], cols: tuple[int, int], piece: ValuePiece, writer: int | None) -> None:
        self.r0, self.r1 = rows
        self.c0, self.c1 = cols
        self.piece = piece
        self.writer = writer
        self.readers = self.adders = self.start = NONE

    def part(self, rows: tuple[int, int], cols: tuple[int, int]) -> Fragment:
        """Return a rectangle of it, with its writer and readers."""
        whole = self.piece
        row, col = whole.row + rows[0] - self.r0, whole.col + cols[0] - self.c0
        part = Fragment(rows, cols, ValuePiece(*whole[:5], row, col, whole.terms), self.writer)
        part.readers, part.adders, part.start = self.readers, self.adders, self.start
        return part


class _Band:
    """Fragments with the same rows, by column."""

    __slots__ = ("fragments", "lefts")

    def __init__(self) -> None:
        self.lefts: list[int] = []  # first columns of the fragments
        self.fragments: list[Fragment] = []


class Contents:
    """Fragments in bands of equal rows: bands are found by bisection by row, fragments of a band by column. Bands are
    grouped by the bit length of their height, so that one tall band does not make the search visit many low ones."""

    def __init__(self, steps: WorkBudget) -> None:
        self._steps = steps
        self._tops: dict[int, list[tuple[int, int]]] = {}  # (top, bottom) of bands, by the bits of their height
        self._bands: dict[tuple[int, int], _Band] = {}  # (top, bottom) -> band

    def overlapping(self, region: Region) -> list[Fragment]:
        """Return the fragments that share an element with the region."""
        (top, bottom), (left, right) = region.rows, region.cols
        near: list[tuple[int, int]] = []
        for bits, tops in self._tops.items():
            # Bands of this height class are less than 1 << bits high: those that reach the region begin that near.
            candidates = tops[bisect_left(tops, (top - (1 << bits) + 1,)) : bisect_left(tops, (bottom,))]
            near = sorted(near + candidates) if near and candidates else near or candidates
        fragments: list[Fragment] = []
        for rows in near:
            if rows[1] > top:
                band = self._bands[rows]
                first = bisect_right(band.lefts, left) - 1
                if first < 0 or band.fragments[first].c1 <= left:
                    first += 1
                last = bisect_left(band.lefts, right)
                fragments += band.fragments[first:last]
        self._steps.spend(len(near) + len(fragments))
        return fragments

    def insert(self, fragment: Fragment) -> None:
        """Add a fragment that overlaps no other."""
        rows = (fragment.r0, fragment.r1)
        band = self._bands.get(rows)
        if band is None:
            band = self._bands[rows] = _Band()
            insort(self._tops.setdefault((rows[1] - rows[0]).bit_length(), []), rows)
        index = bisect_left(band.lefts, fragment.c0)
        band.lefts.insert(index, fragment.c0)
        band.fragments.insert(index, fragment)

    def remove(self, fragment: Fragment) -> None:
        """Remove a fragment."""
        rows = fragment.r0, fragment.r1
        band = self._bands[rows]
        index = bisect_left(band.lefts, fragment.c0)
        del band.lefts[index], band.fragments[index]
        if not band.lefts:
            tops = self._tops[(rows[1] - rows[0]).bit_length()]
            del self._bands[rows], tops[bisect_left(tops, rows)]

    def write(self, region: Region, value: RegionValue, writer: int | None) -> None:
        """Write a value to a region without fragments."""
        r0, c0 = region.rows[0], region.cols[0]
        for piece in value:
            rows, cols = (r0 + piece.lo_i, r0 + piece.hi_i), (c0 + piece.lo_j, c0 + piece.hi_j)
            self.insert(Fragment(rows, cols, piece, writer))

    def free(self, region: Region, is_over: Callable[[int], bool]) -> Fragment | None:
        """Remove what was retired in a region. Return a fragment that stands in the way, and then remove nothing: one
        that lives, or whose Retire need not be over. is_over: whether an operation surely is."""
        for fragment in self.overlapping(region):
            if fragment.piece.tensor != RETIRED or fragment.writer is None or not is_over(fragment.writer):
                return fragment
        for fragment in self.carve(region):
            self.remove(fragment)
        return None

    def carve(self, region: Region) -> list[Fragment]:
        """Return the fragments inside the region, after cutting those that reach across its border."""
        (top, bottom), (left, right) = region.rows, region.cols
        inside = []
        for fragment in self.overlapping(region):
            rows = max(fragment.r0, top), min(fragment.r1, bottom)
            cols = max(fragment.c0, left), min(fragment.c1, right)
            if rows == (fragment.r0, fragment.r1) and cols == (fragment.c0, fragment.c1):
                inside.append(fragment)
                continue
            self.remove(fragment)
            for part in _cut(fragment, rows, cols):
                self.insert(part)
                if part.r0 == rows[0] and part.c0 == cols[0]:
                    inside.append(part)
        return inside


def _cut(fragment: Fragment, rows: tuple[int, int], cols: tuple[int, int]) -> Iterator[Fragment]:
    """Yield the fragment's part in `rows` x `cols` and up to four around it."""
    whole = (fragment.c0, fragment.c1)
    for band, sides in (
        ((fragment.r0, rows[0]), (whole,)),
        (rows, ((fragment.c0, cols[0]), cols, (cols[1], fragment.c1))),
        ((rows[1], fragment.r1), (whole,)),
    ):
        for side in sides:
            if band[0] < band[1] and side[0] < side[1]:
                yield fragment.part(band, side)


def value_of(fragments: list[Fragment], region: Region) -> RegionValue | None:
    """Return the value of the region from the fragments that overlap it; None if they do not cover it."""
    (top, bottom), (left, right) = region.rows, region.cols
    pieces = []
    area = 0
    for fragment in fragments:
        i0, i1 = max(fragment.r0, top), min(fragment.r1, bottom)
        j0, j1 = max(fragment.c0, left), min(fragment.c1, right)
        area += (i1 - i0) * (j1 - j0)
        piece = fragment.piece
        row, col = piece.row + i0 - fragment.r0, piece.col + j0 - fragment.c0
        pieces.append(ValuePiece(i0 - top, i1 - top, j0 - left, j1 - left, piece.tensor, row, col, piece.terms))
    if area < (bottom - top) * (right - left):
        return None
    return merge_pieces(pieces, (bottom - top, right - left)) if pieces else ()

"""The ways to exchange a tensor of an author's kernel, and what is asked for in words: `all_gather.push pieces=2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.plan import DataPath
from overweave.schedules.catalog.options import (
    ANY_MOVER,
    AXIS,
    COL_PIECES,
    COPY_PROGRAMS,
    ISLAND,
    LANES,
    ORDER,
    OWN_PIECES,
    PIECES,
    Option,
    settle,
)
from overweave.schedules.communication import CARRYING_TILES
from overweave.schedules.moves.back_ends import check_mover
from overweave.schedules.moves.moves import AllToAll, Gather, Reduction, Written, movers_in

Side = Literal["gather", "scatter", "spread"]
Asked = str | Written  # a schedule by name and options, or written by hand
HAND_WRITTEN = (Gather, Reduction, AllToAll)
GATHER: Final = "gather"
SCATTER: Final = "scatter"
SPREAD: Final = "spread"


class Transport(Struct, frozen=True):
    """A way to exchange a tensor; docs/directives.md says what each moves.

    side: gather, for what a kernel reads; scatter, for what it writes and ranks sum; spread, for what it writes and
    ranks get as it is. gathers_sums: every rank gets all of the sum.
    """

    side: Side
    method: str
    options: tuple[Option, ...] = ()
    gathers_sums: bool = False

    @property
    def is_woven(self) -> bool:
        """Whether chunks move beside tiles, which then wait or signal; else all moves before the kernel, or behind."""
        return not self.method.endswith("collective")

    @property
    def direction(self) -> str:
        """`receive` or `send`, of an all-to-all."""
        direction = self.method.split("_")[0]
        return direction if direction in ("receive", "send") else ""


TRANSPORTS: dict[str, Transport] = {
    "all_gather.push": Transport(GATHER, "push", (PIECES, ORDER, ANY_MOVER, COPY_PROGRAMS)),
    "all_gather.pull": Transport(GATHER, "pull", (PIECES, ORDER, ANY_MOVER)),
    "all_gather.mesh": Transport(GATHER, "mesh", (PIECES, COL_PIECES, ISLAND, AXIS, LANES, ANY_MOVER, COPY_PROGRAMS)),
    "all_gather.ring": Transport(GATHER, "ring", (PIECES, COL_PIECES, LANES, ANY_MOVER, COPY_PROGRAMS)),
    "all_gather.double_ring": Transport(GATHER, "double_ring", (PIECES, COL_PIECES, ANY_MOVER, COPY_PROGRAMS)),
    "all_gather.islands": Transport(GATHER, "islands", (PIECES, COL_PIECES, ISLAND, ANY_MOVER, COPY_PROGRAMS)),
    "all_gather.collective": Transport(GATHER, "collective"),
    "reduce_scatter.scatter": Transport(SCATTER, "scatter", (PIECES, ORDER, OWN_PIECES, ANY_MOVER, COPY_PROGRAMS)),
    "reduce_scatter.mesh": Transport(
        SCATTER, "mesh", (PIECES, COL_PIECES, ISLAND, AXIS, LANES, ANY_MOVER, COPY_PROGRAMS)
    ),
    "reduce_scatter.ring": Transport(SCATTER, "ring", (PIECES, COL_PIECES, LANES, ANY_MOVER, COPY_PROGRAMS)),
    "reduce_scatter.double_ring": Transport(SCATTER, "double_ring", (PIECES, COL_PIECES, ANY_MOVER, COPY_PROGRAMS)),
    "reduce_scatter.islands": Transport(SCATTER, "islands", (PIECES, COL_PIECES, ISLAND, ANY_MOVER, COPY_PROGRAMS)),
    "reduce_scatter.collective": Transport(SCATTER, "collective"),
    "all_reduce.two_shot": Transport(SCATTER, "two_shot", (PIECES, ANY_MOVER, COPY_PROGRAMS), gathers_sums=True),
    "all_reduce.one_shot": Transport(SCATTER, "one_shot", (ORDER, ANY_MOVER, COPY_PROGRAMS), gathers_sums=True),
    "all_reduce.mesh": Transport(
        SCATTER, "mesh", (PIECES, COL_PIECES, ISLAND, AXIS, LANES, ANY_MOVER, COPY_PROGRAMS), gathers_sums=True
    ),
    "all_reduce.ring": Transport(
        SCATTER, "ring", (PIECES, COL_PIECES, LANES, ANY_MOVER, COPY_PROGRAMS), gathers_sums=True
    ),
    "all_reduce.double_ring": Transport(
        SCATTER, "double_ring", (PIECES, COL_PIECES, ANY_MOVER, COPY_PROGRAMS), gathers_sums=True
    ),
    "all_reduce.islands": Transport(
        SCATTER, "islands", (PIECES, COL_PIECES, ISLAND, ANY_MOVER, COPY_PROGRAMS), gathers_sums=True
    ),
    "all_reduce.collective": Transport(SCATTER, "collective", gathers_sums=True),
    "all_to_all.receive": Transport(GATHER, "receive", (PIECES, ORDER, ANY_MOVER, COPY_PROGRAMS)),
    "all_to_all.send": Transport(SPREAD, "send", (PIECES, ANY_MOVER, COPY_PROGRAMS)),
    "all_to_all.receive_collective": Transport(GATHER, "receive_collective"),
    "all_to_all.send_collective": Transport(SPREAD, "send_collective"),
    "spread.push": Transport(SPREAD, "spread", (PIECES, ANY_MOVER, COPY_PROGRAMS)),
    "spread.collective": Transport(SPREAD, "collective"),
}


BY_HAND: dict[type, Transport] = {
    Gather: Transport(GATHER, "by_hand"),
    Reduction: Transport(SCATTER, "by_hand"),
    AllToAll: Transport(GATHER, "receive_by_hand"),
}
SENT_BY_HAND = Transport(SPREAD, "send_by_hand")


def transport_of(words: object) -> Transport:
    """What a schedule's first word names. Raises InputError."""
    if isinstance(words, HAND_WRITTEN):
        by_hand = SENT_BY_HAND if isinstance(words, AllToAll) and words.sends else BY_HAND[type(words)]
        return replace(by_hand, gathers_sums=True) if isinstance(words, Reduction) and words.everywhere else by_hand
    if not isinstance(words, str):
        found = f"a {type(words).__name__}"
        raise InputError("schedule", found, "Give a name with options, a Gather, Reduction or AllToAll")
    name = words.split(maxsplit=1)[0] if words.strip() else ""
    if name not in TRANSPORTS:
        known = f"Schedules: {', '.join(TRANSPORTS)}"
        cure = "Leave the choice to overweave.compile_auto, by this word alone" if name.endswith(".auto") else known
        raise InputError(f"schedule {words.strip()[:40]!r}", "unknown", cure)
    return TRANSPORTS[name]


def movers_of(words: Asked) -> frozenset[str]:
    """Who carries what a schedule moves. Raises InputError."""
    if not isinstance(words, str):
        return movers_in(words)
    name, *pairs = words.split()
    return frozenset({settle(name, transport_of(words).options, options_of(name, pairs)).mover})


def path_of_slices(schedules: Iterable[Asked]) -> DataPath | None:
    """How the tiles of a kernel carry what goes to peers, if a schedule lets them."""
    movers: set[str] = set()
    for words in schedules:
        if transport_of(words).side == GATHER:
            movers |= movers_of(words)
    carrying = sorted(movers.intersection(CARRYING_TILES))
    if len(carrying) > 1:
        raise InputError("let tiles carry two tensors", f"by {' and '.join(carrying)}", "Name one of them for both")
    return ("bulk" if carrying == ["bulk_tiles"] else "load_store") if carrying else None


def wanted_of(loads: Sequence[str], stores: Sequence[str], schedule: Asked | Mapping[str, Asked]) -> dict[str, Asked]:
    """tensor -> schedule, all of it checked and written anew. Raises InputError.

    One schedule alone stands for the first tensor that is read, or written.
    """
    given: object = schedule
    if not isinstance(given, str | Mapping | Gather | Reduction | AllToAll):
        found, cure = f"a {type(given).__name__}", "Give a name, a list of moves, or a mapping of tensors to them"
        raise InputError("schedules of a kernel", found, cure)
    if isinstance(schedule, str | Gather | Reduction | AllToAll):
        side = loads if transport_of(schedule).side == GATHER else stores
        if not side:
            raise InputError(f"schedule {str(schedule)[:40]!r}", "the kernel reads no tensor", "Annotate a load")
        schedule = {side[0]: schedule}
    for tensor, words in schedule.items():
        if not isinstance(tensor, str):
            raise InputError(f"schedule for {str(tensor)[:40]}", f"a {type(tensor).__name__}", "Name a tensor")
        known = loads if transport_of(words).side == GATHER else stores
        if tensor not in known:
            found = f"the kernel {'reads' if known is loads else 'writes'} {', '.join(known) or 'none'}"
            raise InputError(f"schedule {str(words)[:40]!r} for {tensor[:40]!r}", found, "Name one of its tensors")
    return {tensor: _rewritten(words) for tensor, words in schedule.items()}


def _rewritten(words: Asked) -> Asked:
    """The same schedule from what was parsed: nothing of a caller's text is kept."""
    if not isinstance(words, str):
        return words
    name, *pairs = words.split()
    asked = options_of(name, pairs)
    settings = settle(name, TRANSPORTS[name].options, asked)
    check_mover(name, settings.mover)
    return " ".join([name, *(f"{option}={getattr(settings, option)}" for option in asked)])


def options_of(name: str, pairs: list[str]) -> dict[str, str | int]:
    """What stands behind a name, as `option=value`. Raises InputError."""
    options: dict[str, str | int] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator or option in options:
            raise InputError(f"schedule {name}", f"{pair[:40]!r} is no option, or stands twice", "Write option=value")
        options[option] = value
    return options

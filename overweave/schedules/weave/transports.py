"""The ways to exchange a tensor of an author's kernel, and what is asked for in words: `all_gather.push pieces=2`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, nearest
from overweave.ir.operators import matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import COPY_ENGINE, REDUCE_KERNEL, DataPath
from overweave.schedules.communication import CARRYING_TILES, Mover
from overweave.schedules.families import sums
from overweave.schedules.families.sums import sums_by
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.moves import gather_templates as gathers
from overweave.schedules.moves import reduction_templates as reductions
from overweave.schedules.moves.back_ends import FORWARDS, MOVERS, PULLS, REGISTERS
from overweave.schedules.moves.gather_templates import Mesh, gather_of
from overweave.schedules.moves.moves import AllToAll, Gather, Reduction, ReductionStep, Written, movers_in
from overweave.schedules.moves.reduction_templates import reduction_of
from overweave.schedules.records.options import (
    ANY_MOVER,
    AXIS,
    COL_PIECES,
    COPY_PROGRAMS,
    ISLAND,
    LANES,
    ORDER,
    OWN_PIECES,
    PIECES,
    SUMS,
    TILES,
    Option,
    settle,
)
from overweave.schedules.records.record import Adds, Method

TransportDirection = Literal["gather", "scatter", "spread"]
ScheduleChoice = str | Written  # a schedule by name and options, or written by hand
HAND_WRITTEN = (Gather, Reduction, AllToAll)
GATHER: Final = "gather"
SCATTER: Final = "scatter"
SPREAD: Final = "spread"


class Transport(Struct, frozen=True):
    """A way to exchange a tensor; docs/directives.md says what each moves.

    side: gather, for what a kernel reads; scatter, for what it writes and ranks sum; spread, for what it writes and
    ranks get as it is. written: the template of a list of moves, or a method of an operator; None: a caller's own list.
    gathers_sums: every rank gets all of the sum. is_woven: chunks move beside tiles, which then wait or signal; else
    all moves before the kernel, or behind. is_traded: an all-to-all, after which every rank has a tensor of its own.
    refuses, why: the back ends that cannot carry it, for one reason.
    """

    side: TransportDirection
    written: Callable[[Mesh], Written] | Method | None = None
    options: tuple[Option, ...] = ()
    gathers_sums: bool = False
    is_woven: bool = True
    is_traded: bool = False
    refuses: tuple[Mover, ...] = ()
    why: str = ""


BY_ANY = (ANY_MOVER, COPY_PROGRAMS)
PUSHED, CUT = (PIECES, ORDER, *BY_ANY), (PIECES, COL_PIECES)


class OnMesh(NamedTuple):
    """Lists of moves that gather, that sum, and, one behind the other, that gather sums. refuses: of the gather."""

    gathered: gathers.Template
    summed: Callable[[Mesh], Iterator[ReductionStep]]
    options: tuple[Option, ...]
    refuses: tuple[Mover, ...] = CARRYING_TILES


ON_MESH = {
    "mesh": OnMesh(gathers.across_mesh, reductions.across_mesh, (*CUT, ISLAND, AXIS, LANES, *BY_ANY), ()),
    "ring": OnMesh(gathers.round_ring, reductions.round_ring, (*CUT, LANES, *BY_ANY)),
    "double_ring": OnMesh(gathers.round_two_rings, reductions.round_two_rings, (*CUT, *BY_ANY)),
    "islands": OnMesh(gathers.by_islands, reductions.by_islands, (*CUT, ISLAND, *BY_ANY)),
}


def _traded(sends: bool, by_library: bool, options: tuple[Option, ...] = ()) -> Transport:
    written = partial(gathers.all_to_all_of, sends, by_library)
    return Transport(SPREAD if sends else GATHER, written, options, is_woven=not by_library, is_traded=True)


_RS, _AR = matmul_reduce_scatter.OPERATOR.name, matmul_all_reduce.OPERATOR.name
_ONE_SHOT = Method(operator=_AR, name="one_shot", summary="", write=sums_by(sums.ONE_SHOT), adds=Adds(REDUCE_KERNEL))
TRANSPORTS: dict[str, Transport] = {
    "all_gather.push": Transport(GATHER, partial(gather_of, gathers.push), PUSHED),
    "all_gather.pull": Transport(
        GATHER, partial(gather_of, gathers.pull), (PIECES, ORDER, ANY_MOVER), refuses=MOVERS[1:], why=PULLS
    ),
    **{
        f"all_gather.{name}": Transport(GATHER, partial(gather_of, gathered), options, refuses=refuses, why=FORWARDS)
        for name, (gathered, _, options, refuses) in ON_MESH.items()
    },
    "all_gather.collective": Transport(GATHER, partial(gather_of, gathers.at_once), is_woven=False),
    "reduce_scatter.scatter": Transport(SCATTER, METHODS[f"{_RS}.scatter"], (PIECES, ORDER, OWN_PIECES, *BY_ANY)),
    **{
        f"reduce_scatter.{name}": Transport(SCATTER, partial(reduction_of, summed, None), options)
        for name, (_, summed, options, _) in ON_MESH.items()
    },
    "reduce_scatter.collective": Transport(SCATTER, METHODS[f"{_RS}.sequential"], is_woven=False),
    "all_reduce.two_shot": Transport(SCATTER, METHODS[f"{_AR}.two_shot"], (PIECES, *BY_ANY), gathers_sums=True),
    "all_reduce.one_shot": Transport(SCATTER, _ONE_SHOT, (ORDER, *BY_ANY), gathers_sums=True),
    **{
        f"all_reduce.{name}": Transport(SCATTER, partial(reduction_of, summed, gathered), options, gathers_sums=True)
        for name, (gathered, summed, options, _) in ON_MESH.items()
    },
    "all_reduce.collective": Transport(SCATTER, METHODS[f"{_AR}.sequential"], gathers_sums=True, is_woven=False),
    "all_to_all.receive": _traded(False, False, PUSHED),
    "all_to_all.send": _traded(True, False, (PIECES, *BY_ANY)),
    "all_to_all.receive_collective": _traded(False, True),
    "all_to_all.send_collective": _traded(True, True),
    "spread.push": Transport(SPREAD, partial(gather_of, gathers.push_to_all), (PIECES, *BY_ANY)),
    "spread.collective": Transport(SPREAD, partial(gather_of, gathers.at_once), is_woven=False),
}


def transports() -> dict[str, Transport]:
    """Every transport by its name: those above, and each registered method that moves rows beside tiles."""
    named = dict(TRANSPORTS)
    for found in map(_of_method, METHODS.values()):
        if found:
            named.setdefault(*found)
    return named


def _of_method(method: Method) -> tuple[str, Transport] | None:
    """A method as authors ask for it; None where its tiles add or store at peers, or its moves are another kernel's."""
    record, adds = operator_of(method.operator), method.adds
    is_beside = method.write is not None and method.is_fused and {*method.moves} == {COPY_ENGINE}
    if not is_beside or record.exchanges or (adds and adds.by != REDUCE_KERNEL):
        return None
    collective = "all_gather" if record.gathers else "all_reduce" if record.shares_sums else "reduce_scatter"
    taken = tuple(option for option in method.options if option not in (*TILES, SUMS))
    side: TransportDirection = GATHER if record.gathers else SCATTER
    return f"{collective}.{method.name}", Transport(side, method, taken, gathers_sums=record.shares_sums)


BY_HAND: dict[type, Transport] = {
    Gather: Transport(GATHER),
    Reduction: Transport(SCATTER),
    AllToAll: Transport(GATHER, is_traded=True),
}
SENT_BY_HAND = Transport(SPREAD, is_traded=True)


def transport_of(words: object) -> Transport:
    """What a schedule's first word names. Raises InputError."""
    if isinstance(words, HAND_WRITTEN):
        by_hand = SENT_BY_HAND if isinstance(words, AllToAll) and words.sends else BY_HAND[type(words)]
        return replace(by_hand, gathers_sums=True) if isinstance(words, Reduction) and words.everywhere else by_hand
    if not isinstance(words, str):
        found = f"a {type(words).__name__}"
        raise InputError("schedule", found, "Give a name with options, a Gather, Reduction or AllToAll")
    name = words.split(maxsplit=1)[0] if words.strip() else ""
    if name not in (named := transports()):
        known = nearest("Schedules", name, named, "overweave show")
        cure = "Leave the choice to overweave.compile_auto, by this word alone" if name.endswith(".auto") else known
        raise InputError(f"schedule {words.strip()[:40]!r}", "unknown", cure)
    return named[name]


def obstacle(name: str, mover: Mover) -> str:
    """Why a back end cannot carry the exchange `name`; empty if it can. The copy engine passes things on."""
    transport = transport_of(name)
    if mover in transport.refuses:
        return transport.why
    return REGISTERS if mover == "bulk_tiles" and transport.side != GATHER else ""


def check_mover(name: str, mover: Mover) -> None:
    """Raises InputError, with the reason, for a back end that cannot carry the exchange `name`."""
    if found := obstacle(name, mover):
        raise InputError(f"{name} mover={mover}", found, f"Use mover={'|'.join(legal(name))}")


def legal(name: str) -> Iterator[Mover]:
    """The back ends that can."""
    return (mover for mover in MOVERS if not obstacle(name, mover))


def movers_of(words: ScheduleChoice) -> frozenset[str]:
    """Who carries what a schedule moves. Raises InputError."""
    if not isinstance(words, str):
        return movers_in(words)
    name, *pairs = words.split()
    return frozenset({settle(name, transport_of(words).options, options_of(name, pairs)).mover})


def path_of_slices(schedules: Iterable[ScheduleChoice]) -> DataPath | None:
    """How the tiles of a kernel carry what goes to peers, if a schedule lets them."""
    movers: set[str] = set()
    for words in schedules:
        if transport_of(words).side == GATHER:
            movers |= movers_of(words)
    carrying = sorted(movers.intersection(CARRYING_TILES))
    if len(carrying) > 1:
        raise InputError("let tiles carry two tensors", f"by {' and '.join(carrying)}", "Name one of them for both")
    return ("bulk" if carrying == ["bulk_tiles"] else "load_store") if carrying else None


def wanted_of(
    loads: Sequence[str], stores: Sequence[str], schedule: ScheduleChoice | Mapping[str, ScheduleChoice]
) -> dict[str, ScheduleChoice]:
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


def _rewritten(words: ScheduleChoice) -> ScheduleChoice:
    """The same schedule from what was parsed: nothing of a caller's text is kept."""
    if not isinstance(words, str):
        return words
    name, *pairs = words.split()
    asked = options_of(name, pairs)
    settings = settle(name, transport_of(words).options, asked)
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

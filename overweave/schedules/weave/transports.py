"""The ways to exchange a tensor of an author's kernel, and what is asked for in words: `all_gather.push pieces=2`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, nearest
from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, REDUCE_KERNEL, TILE_KERNEL, DataPath, ReduceConfig
from overweave.ir.problem import Problem
from overweave.ir.schedule import Get, Put, Range
from overweave.schedules.communication import CARRYING_TILES, Communication, Mover, Split, X
from overweave.schedules.methods.registry import AUTHORED, METHODS
from overweave.schedules.moves.gather_templates import COLS_ALIGNMENT
from overweave.schedules.moves.moves import (
    FORWARDS,
    MOVERS,
    PULLS,
    REGISTERS,
    AllToAll,
    Gather,
    Reduction,
    Written,
    movers_in,
)
from overweave.schedules.records.options import (
    ANY_MOVER,
    COPY_PROGRAMS,
    MATMUL,
    MOVER,
    ROTATION,
    SUMS,
    TILES,
    Option,
    Settings,
    settle,
)
from overweave.schedules.records.record import Method, MethodInputs

TransportDirection = Literal["gather", "scatter", "spread"]
ScheduleChoice = str | Written  # a schedule by name and options, or written by hand
GATHER: Final = "gather"
SCATTER: Final = "scatter"
SPREAD: Final = "spread"


class Transport(Struct, frozen=True):
    """A way to exchange a tensor; docs/directives.md says what each moves.

    side: gather, for what a kernel reads; scatter, for what it writes and ranks sum; spread, for what it writes and
    ranks get as it is. method: whose moves these are; None: a caller's own list. gathers_sums: every rank gets all of
    the sum. is_traded: an all-to-all, after which every rank has a tensor of its own. refuses, why: the back ends that
    cannot carry it, for one reason.
    """

    side: TransportDirection
    method: Method | None = None
    options: tuple[Option, ...] = ()
    gathers_sums: bool = False
    is_traded: bool = False
    refuses: tuple[Mover, ...] = ()
    why: str = ""

    @property
    def is_woven(self) -> bool:
        """Whether chunks move beside tiles, which wait or signal; else all moves before the kernel, or behind."""
        return self.method is None or not (self.method.is_plain or self.method.has_messages)


# Options that say how the tiles of an operator's own kernel compute, or are a matter of study.
_OF_OPERATORS = frozenset(one.name for one in (*TILES, SUMS, MATMUL, ROTATION, MOVER, COPY_PROGRAMS))
_SIDES: dict[
    str, TransportDirection | None
] = {  # of collectives, in the order of the list; None: of one side or the other
    "all_gather": GATHER,
    "reduce_scatter": SCATTER,
    "all_reduce": SCATTER,
    "all_to_all": None,
    "spread": SPREAD,
}


def transports() -> dict[str, Transport]:
    """Every transport by its name: each method that a tensor of an author's kernel can be exchanged by."""
    return _transports((*METHODS, *AUTHORED))


@lru_cache(maxsize=8)
def _transports(known: tuple[str, ...]) -> dict[str, Transport]:
    named = {_name(method): method for method in (*METHODS.values(), *AUTHORED.values()) if _is_served(method)}
    ordered = sorted(named, key=lambda name: list(_SIDES).index(name.partition(".")[0]))
    return {name: _of_method(name, named[name]) for name in ordered}


def _is_served(method: Method) -> bool:
    """Not where its tiles add or store at peers, or what moves is another kernel's."""
    if method.transport:
        return True
    is_beside = method.multiplies in (TILE_KERNEL, AUTHOR_KERNEL) and {*method.moves} == {COPY_ENGINE}
    is_summed = method.adds is None or method.adds.by == REDUCE_KERNEL
    return method.write is not None and is_beside and is_summed and not operator_of(method.operator).exchanges


def _name(method: Method) -> str:
    record = operator_of(method.operator)
    collective = "all_gather" if record.gathers else "all_reduce" if record.shares_sums else "reduce_scatter"
    return method.transport or f"{collective}.{method.name}"


def _of_method(name: str, method: Method) -> Transport:
    record = operator_of(method.operator)
    side = _SIDES[name.partition(".")[0]] or (GATHER if record.gathers else SPREAD)
    options = tuple(option for option in method.options if option.name not in _OF_OPERATORS)
    made = Transport(side, method, options, side == SCATTER and record.shares_sums, record.exchanges)
    if COPY_ENGINE not in method.moves:
        return made
    refuses, why = _refused(method) if side == GATHER else ((), "")
    return replace(made, options=(*options, ANY_MOVER, COPY_PROGRAMS), refuses=refuses, why=why)


def _refused(method: Method) -> tuple[tuple[Mover, ...], str]:
    """The back ends that cannot carry what a method gathers, and why: by its moves among four ranks."""
    steps = moves_of(method, Split(rows=4, world_size=4), Settings(), COLS_ALIGNMENT).steps
    if any(isinstance(step, Get) for step in steps):
        return MOVERS[1:], PULLS
    is_passed_on = any(isinstance(step, Put) and step.sources[0].buffer != X for step in steps)
    return (CARRYING_TILES, FORWARDS) if is_passed_on else ((), "")


def moves_of(method: Method, split: Split, settings: Settings, cols: int) -> Communication:
    """The moves of a method's operator, of `cols` columns."""
    ranks = split.world_size
    problem = Problem(operator=method.operator, m=split.rows, n=cols, k=cols, world_size=ranks, dtype=SUM_DTYPE)
    assert method.write is not None, f"{method.full_name} has no moves"
    return method.write(MethodInputs(problem, settings, None, split, ReduceConfig(), held_of(ranks), method))


def held_of(ranks: int) -> tuple[Range, ...]:
    """What each rank's partial holds of the sum."""
    return tuple((rank, rank + 1) for rank in range(ranks))


def transport_of(words: object) -> Transport:
    """What a schedule's first word names. Raises InputError."""
    if isinstance(words, AllToAll):
        return Transport(SPREAD if words.sends else GATHER, is_traded=True)
    if isinstance(words, Reduction):
        return Transport(SCATTER, gathers_sums=words.everywhere)
    if isinstance(words, Gather):
        return Transport(GATHER)
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

"""Transports: methods by which authors' tensors are exchanged, and parsing `all_gather.push pieces=2`."""

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
    """A method that exchanges a tensor; docs/directives.md says what each moves.

    side: gather, for what a kernel loads; scatter, for what it stores and ranks sum; spread, for what it stores and
    ranks get unsummed. method: whose moves these are; None: a caller's own list. gathers_sums: every rank gets the
    whole sum. is_traded: an all-to-all, after which each rank has a tensor of its own. refuses, why: movers that cannot
    run it, and the reason.
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
        """Whether chunks move while tiles run, which wait or signal; else all moves before the kernel, or after it."""
        return self.method is None or not (self.method.is_plain or self.method.has_messages)


# Options of operators' own kernels, or of studies, which authors' kernels do not have.
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
    named = {
        _transport_name(method): method for method in (*METHODS.values(), *AUTHORED.values()) if _is_served(method)
    }
    ordered = sorted(named, key=lambda name: list(_SIDES).index(name.partition(".")[0]))
    return {name: _transport_of(name, named[name]) for name in ordered}


def _is_served(method: Method) -> bool:
    """Return whether a method serves authors: copies run beside tiles, which neither add nor store at peers."""
    if method.transport:
        return True
    moves_beside_tiles = method.multiplies in (TILE_KERNEL, AUTHOR_KERNEL) and {*method.moves} == {COPY_ENGINE}
    is_summed = method.adds is None or method.adds.by == REDUCE_KERNEL
    return method.write is not None and moves_beside_tiles and is_summed and not operator_of(method.operator).exchanges


def _transport_name(method: Method) -> str:
    """Return a transport's name: the collective and the method, unless the method names it itself."""
    record = operator_of(method.operator)
    collective = "all_gather" if record.gathers else "all_reduce" if record.shares_sums else "reduce_scatter"
    return method.transport or f"{collective}.{method.name}"


def _transport_of(name: str, method: Method) -> Transport:
    """Return the transport of a method, with the movers that cannot run it."""
    record = operator_of(method.operator)
    side = _SIDES[name.partition(".")[0]] or (GATHER if record.gathers else SPREAD)
    options = tuple(option for option in method.options if option.name not in _OF_OPERATORS)
    transport = Transport(side, method, options, side == SCATTER and record.shares_sums, record.exchanges)
    if COPY_ENGINE not in method.moves:
        return transport
    refuses, why = _refused(method) if side == GATHER else ((), "")
    return replace(transport, options=(*options, ANY_MOVER, COPY_PROGRAMS), refuses=refuses, why=why)


def _refused(method: Method) -> tuple[tuple[Mover, ...], str]:
    """Return (movers that cannot run a gathering method, why), judged by its moves among four ranks."""
    steps = moves_of(method, Split(rows=4, world_size=4), Settings(), COLS_ALIGNMENT).steps
    if any(isinstance(step, Get) for step in steps):
        return MOVERS[1:], PULLS
    is_passed_on = any(isinstance(step, Put) and step.sources[0].buffer != X for step in steps)
    return (CARRYING_TILES, FORWARDS) if is_passed_on else ((), "")


def moves_of(method: Method, split: Split, settings: Settings, cols: int) -> Communication:
    """Return the communication that a method writes for a matrix of `cols` columns, divided by `split`."""
    ranks = split.world_size
    problem = Problem(operator=method.operator, m=split.rows, n=cols, k=cols, world_size=ranks, dtype=SUM_DTYPE)
    assert method.write is not None, f"{method.full_name} has no moves"
    return method.write(MethodInputs(problem, settings, None, split, ReduceConfig(), held_of(ranks), method))


def held_of(ranks: int) -> tuple[Range, ...]:
    """Return each rank's terms of a sum: its own, as a range."""
    return tuple((rank, rank + 1) for rank in range(ranks))


def transport_of(choice: object) -> Transport:
    """Return the transport that a schedule names, or a hand-written list needs. Raises InputError."""
    if isinstance(choice, AllToAll):
        return Transport(SPREAD if choice.sends else GATHER, is_traded=True)
    if isinstance(choice, Reduction):
        return Transport(SCATTER, gathers_sums=choice.everywhere)
    if isinstance(choice, Gather):
        return Transport(GATHER)
    if not isinstance(choice, str):
        found = f"a {type(choice).__name__}"
        raise InputError("schedule", found, "Give a name with options, a Gather, Reduction or AllToAll")
    name = choice.split(maxsplit=1)[0] if choice.strip() else ""
    if name not in (named := transports()):
        known = nearest("Schedules", name, named, "overweave show")
        cure = "Leave the choice to overweave.compile_auto, by this word alone" if name.endswith(".auto") else known
        raise InputError(f"schedule {choice.strip()[:40]!r}", "unknown", cure)
    return named[name]


def obstacle(name: str, mover: Mover) -> str:
    """Return why a mover cannot run transport `name`; empty if it can. The copy engine runs all."""
    transport = transport_of(name)
    if mover in transport.refuses:
        return transport.why
    return REGISTERS if mover == "bulk_tiles" and transport.side != GATHER else ""


def check_mover(name: str, mover: Mover) -> None:
    """Raise InputError, with the reason, if a mover cannot run transport `name`."""
    if reason := obstacle(name, mover):
        raise InputError(f"{name} mover={mover}", reason, f"Use mover={'|'.join(legal(name))}")


def legal(name: str) -> Iterator[Mover]:
    """Return the movers that can run transport `name`."""
    return (mover for mover in MOVERS if not obstacle(name, mover))


def movers_of(choice: ScheduleChoice) -> frozenset[str]:
    """Return the movers of a schedule: copy engine, copy kernel or tiles. Raises InputError."""
    if not isinstance(choice, str):
        return movers_in(choice)
    name, *pairs = choice.split()
    return frozenset({settle(name, transport_of(choice).options, options_of(name, pairs)).mover})


def path_of_slices(schedules: Iterable[ScheduleChoice]) -> DataPath | None:
    """Return the data path by which tiles push slices; None if no schedule asks. Raises InputError for two."""
    movers: set[str] = set()
    for choice in schedules:
        if transport_of(choice).side == GATHER:
            movers |= movers_of(choice)
    tile_movers = sorted(movers.intersection(CARRYING_TILES))
    if len(tile_movers) > 1:
        raise InputError("let tiles carry two tensors", f"by {' and '.join(tile_movers)}", "Name one of them for both")
    return ("bulk" if tile_movers == ["bulk_tiles"] else "load_store") if tile_movers else None


def wanted_of(
    loads: Sequence[str], stores: Sequence[str], schedule: ScheduleChoice | Mapping[str, ScheduleChoice]
) -> dict[str, ScheduleChoice]:
    """Return tensor -> schedule, checked and normalised. Raises InputError.

    A single schedule is that of the first tensor that the kernel loads, or stores.
    """
    argument: object = schedule
    if not isinstance(argument, str | Mapping | Gather | Reduction | AllToAll):
        found, cure = f"a {type(argument).__name__}", "Give a name, a list of moves, or a mapping of tensors to them"
        raise InputError("schedules of a kernel", found, cure)
    if isinstance(schedule, str | Gather | Reduction | AllToAll):
        tensors = loads if transport_of(schedule).side == GATHER else stores
        if not tensors:
            raise InputError(f"schedule {str(schedule)[:40]!r}", "the kernel reads no tensor", "Annotate a load")
        schedule = {tensors[0]: schedule}
    for tensor, choice in schedule.items():
        if not isinstance(tensor, str):
            raise InputError(f"schedule for {str(tensor)[:40]}", f"a {type(tensor).__name__}", "Name a tensor")
        tensors = loads if transport_of(choice).side == GATHER else stores
        if tensor not in tensors:
            found = f"the kernel {'reads' if tensors is loads else 'writes'} {', '.join(tensors) or 'none'}"
            raise InputError(f"schedule {str(choice)[:40]!r} for {tensor[:40]!r}", found, "Name one of its tensors")
    return {tensor: _normalized(choice) for tensor, choice in schedule.items()}


def _normalized(choice: ScheduleChoice) -> ScheduleChoice:
    """Return a schedule rewritten from what was parsed, so that equal schedules are equal strings."""
    if not isinstance(choice, str):
        return choice
    name, *pairs = choice.split()
    options = options_of(name, pairs)
    settings = settle(name, transport_of(choice).options, options)
    check_mover(name, settings.mover)
    return " ".join([name, *(f"{option}={getattr(settings, option)}" for option in options)])


def options_of(name: str, pairs: list[str]) -> dict[str, str | int]:
    """Parse the `option=value` words after a schedule's name. Raises InputError."""
    options: dict[str, str | int] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator or option in options:
            raise InputError(f"schedule {name}", f"{pair[:40]!r} is no option, or stands twice", "Write option=value")
        options[option] = value
    return options

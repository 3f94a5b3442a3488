"""Programs of two ranks that push, read and reuse tiles by `copy_kernel`, and the races that are seeded in them.

A program is data: launches of the one kernel, each a table of moves that wait for signals and give one. A race is a
change of a table, or of the text of a device function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overweave.ir.plan import COPY_WORD_BYTES
from overweave.ir.tile_order import COPY, NO_SIGNAL, WORKSPACE, TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords

ROWS, TILE_ROWS, ROW_INTS = 32, 8, 64
TILES = ROWS // TILE_ROWS
BUFFERS = ("given", "received", "echo", "out")
SIGNALS, SIGNAL_INTS = 32, 32  # one signal in a line of 128 bytes
BUFFER_INTS = ROWS * ROW_INTS
RANK_INTS = len(BUFFERS) * BUFFER_INTS + SIGNALS * SIGNAL_INTS
BLOCKS = 4  # of a launch: each claims a tile
BLOCK_INTS = 256  # that a block moves at a time
INTS_OF_A_WORD = COPY_WORD_BYTES // 4
WAIT_NS = 4_000_000_000  # that a wait may take


class Move(NamedTuple):
    """A tile of a launch: rows of what it reads go to (rank, buffer, row), and `signal` at rank `tells` gets one.

    waits: the own signals `[low, high)` that must have one before.
    """

    source_row: int
    target: tuple[int, str, int]
    rows: int = TILE_ROWS
    waits: tuple[int, int] = (0, 0)
    signal: int = NO_SIGNAL
    tells: int = 0


class Launch(NamedTuple):
    """One launch of the kernel on a rank's only stream, which reads one own buffer."""

    rank: int
    source: str
    moves: tuple[Move, ...]


Program = tuple[Launch, ...]  # in an order in which one process may run them all


def _tiles(
    rank: int, source: str, target: tuple[int, str], first_signal: int, tells: int, first_wait: int = -1
) -> Launch:
    """Each tile of a buffer goes to the same rows of another one; tile t waits for signal first_wait + t, if any."""
    moves = (
        Move(
            tile * TILE_ROWS,
            (*target, tile * TILE_ROWS),
            waits=(first_wait + tile, first_wait + tile + 1) if first_wait >= 0 else (0, 0),
            signal=first_signal + tile,
            tells=tells,
        )
        for tile in range(TILES)
    )
    return Launch(rank, source, tuple(moves))


def relay() -> Program:
    """Rank 0 pushes to rank 1, which pushes what has come back to rank 0, which reads it."""
    return (
        _tiles(0, "given", (1, "received"), 0, tells=1),
        _tiles(1, "received", (0, "echo"), 0, tells=0, first_wait=0),
        _tiles(0, "echo", (0, "out"), 16, tells=0, first_wait=0),
    )


def pairs() -> Program:
    """Rank 0 pushes; rank 1 reads two tiles at once, for whose two signals it waits."""
    two = (Move(row, (1, "out", row), 2 * TILE_ROWS, (at, at + 2)) for at, row in ((0, 0), (2, 16)))
    return _tiles(0, "given", (1, "received"), 0, tells=1), Launch(1, "received", tuple(two))


def reuse() -> Program:
    """Rank 0 pushes twice into the same rows, the second time behind the credits of rank 1, which reads both."""
    return (
        _tiles(0, "given", (1, "received"), 0, tells=1),
        _tiles(1, "received", (1, "out"), 0, tells=0, first_wait=0),
        _tiles(0, "given", (1, "received"), 8, tells=1, first_wait=0),
        _tiles(1, "received", (1, "echo"), 16, tells=1, first_wait=8),
    )


def halves() -> Program:
    """Each rank writes half of the rows of rank 1, which reads them all."""
    pushed, own = _tiles(0, "given", (1, "received"), 0, tells=1), _tiles(1, "given", (1, "received"), 0, tells=1)
    read = _tiles(1, "received", (1, "out"), 16, tells=1, first_wait=0)
    half = TILES // 2
    return pushed._replace(moves=pushed.moves[:half]), own._replace(moves=own.moves[half:]), read


RIGHT: Mapping[str, Callable[[], Program]] = {each.__name__: each for each in (relay, pairs, reuse, halves)}


def with_waits(program: Program, at: int, waits: Callable[[int, tuple[int, int]], tuple[int, int]]) -> Program:
    """The program with other waits of a launch's tiles: `waits(tile, waits)`."""
    launch = program[at]
    moves = tuple(each._replace(waits=waits(tile, each.waits)) for tile, each in enumerate(launch.moves))
    return (*program[:at], launch._replace(moves=moves), *program[at + 1 :])


class Change(NamedTuple):
    """Of a device function's file: what is written, once, and what is written in its place."""

    module: str
    old: str
    new: str


SIGNALS_FILE = "overweave.memory.device.signals"
TABLE_FILE = "overweave.lang.tile_table"
COPY_FILE = "overweave.kernels.copy"
FILES = (SIGNALS_FILE, TABLE_FILE, COPY_FILE)  # in the order in which they import one another

# A detector that reads Triton's IR sees no inline assembly: all programs wait in Triton's own words.
POLL = Change(
    SIGNALS_FILE,
    """        status = tl.inline_asm_elementwise(
            WAIT_ASSEMBLY if has_bulk_copies() else WAIT_ASSEMBLY_BEFORE_SM90,
            "=r,l,r,l,l",
            [word, expected, words, tl.load(limits + TIMEOUT_NS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
""",
    f"""        status = tl.atomic_poll(word, expected, sem="acquire", scope="sys", timeout_ns={WAIT_NS}).to(tl.int32)
""",
)
_WAIT = """        verdict = wait_for_tile(
            table, tile, protocol.signals, protocol.words, protocol.limits, protocol.world_size
        )  # fmt: skip
"""
_MOVE = """            move_words(target, source_row_pointer, count, BLOCK, BULK, ALONE=True)
"""
_NOTIFY = """        signal = read_column(table, tile, SIGNAL)
        if signal != SIGNALS_NOBODY:
            peer_signals = tl.load(addresses + PEER_SIGNALS).to(tl.pointer_type(tl.int32))
            notify(peer_signals + signal * STRIDE, verdict == 1)
"""
_BEFORE_MOVE = "        if ADDS:\n"
_CLAIM = 'tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")'
_BARRIER = "    tl.debug_barrier()\n"
_RELEASE = """    tl.atomic_add(signal, 1, mask=enabled, sem="release", scope="sys")"""


class Race(NamedTuple):
    """What is broken in a program. table: gives it the wrong tables. changes: of the text. is_seen: whether GSan says
    that it sees such races (README of triton/experimental/gsan).
    """

    name: str
    program: str
    table: Callable[[Program], Program] = lambda program: program
    changes: tuple[Change, ...] = ()
    is_seen: bool = True


def _without_waits(at: int) -> Callable[[Program], Program]:
    return lambda program: with_waits(program, at, lambda tile, waits: (0, 0))


def _behind_the_next(at: int) -> Callable[[Program], Program]:
    """Tiles of a launch wait for the signal of the tile behind their own."""
    return lambda program: with_waits(program, at, lambda tile, _: ((tile + 1) % TILES, (tile + 1) % TILES + 1))


def _one_without(program: Program) -> Program:
    return with_waits(program, 1, lambda tile, waits: (0, 0) if tile == TILES // 2 else waits)


def _first_of_two(program: Program) -> Program:
    return with_waits(program, 1, lambda tile, waits: (waits[0], waits[0] + 1))


def _one_row_more(program: Program) -> Program:
    pushed, own, read = program
    first = own.moves[0]
    row = first.source_row - 1
    longer = first._replace(source_row=row, target=(1, "received", row), rows=first.rows + 1)
    return pushed, own._replace(moves=(longer, *own.moves[1:])), read


_READ_FIRST = Change(COPY_FILE, _WAIT, "        verdict = 1\n"), Change(COPY_FILE, _MOVE, _MOVE + _WAIT)
_TELL_FIRST = Change(COPY_FILE, _NOTIFY, ""), Change(COPY_FILE, _BEFORE_MOVE, _NOTIFY + _BEFORE_MOVE)
_RELAXED_WAIT = Change(SIGNALS_FILE, 'expected, sem="acquire", scope', 'expected, sem="relaxed", scope')
_RELAXED_SIGNAL = Change(SIGNALS_FILE, _RELEASE, _RELEASE.replace("release", "relaxed"))
_SIGNAL_TO_ONE_GPU = Change(SIGNALS_FILE, _RELEASE, _RELEASE.replace("sys", "gpu"))
_TWICE_CLAIMED = Change(TABLE_FILE, _CLAIM, f"{_CLAIM} // 2")
_NO_BARRIER = Change(SIGNALS_FILE, _BARRIER + _RELEASE, _RELEASE)
RACES = (
    Race("no tile waits for what it reads", "relay", _without_waits(1)),
    Race("one tile of four does not wait", "relay", _one_without),
    Race("tiles wait for the next tile's signal", "relay", _behind_the_next(1)),
    Race("tiles wait for the first of their two signals", "pairs", _first_of_two),
    Race("tiles are read before they are waited for", "relay", changes=_READ_FIRST),
    Race("waits are relaxed", "relay", changes=(_RELAXED_WAIT,)),
    Race("signals come before what they stand for", "relay", changes=_TELL_FIRST),
    Race("signals are relaxed", "relay", changes=(_RELAXED_SIGNAL,)),
    Race("signals are released to one GPU alone", "relay", changes=(_SIGNAL_TO_ONE_GPU,)),
    Race("rows are written again without a credit", "reuse", _without_waits(2)),
    Race("rows are written again behind another credit", "reuse", _behind_the_next(2)),
    Race("two ranks write one row", "halves", _one_row_more),
    Race("two blocks take one tile", "relay", changes=(_TWICE_CLAIMED,)),
    Race("no barrier of the block before a signal", "relay", changes=(_NO_BARRIER,), is_seen=False),
)


def changed_text(module: str, changes: Iterable[Change]) -> str:
    """The text of a module's file with the changes that are its. Raises ValueError where one does not fit."""
    text = Path(import_module("overweave").__path__[0], *module.split(".")[1:]).with_suffix(".py").read_text()
    for change in changes:
        if change.module == module:
            if text.count(change.old) != 1:
                raise ValueError(f"{module} has {text.count(change.old)} times what is to be changed: {change.old}")
            text = text.replace(change.old, change.new)
    return text


def load_kernel(changes: Sequence[Change], folder: Path) -> Any:
    """`copy_kernel` out of changed files, kept in `folder` for Triton, in a process that has imported none of them."""
    for module in FILES:
        if not any(change.module == module for change in changes):
            continue
        if module in sys.modules:
            raise ValueError(f"{module} has been imported: a changed one would stand beside it")
        import_module(module.rpartition(".")[0])
        path = folder / f"{module.rpartition('.')[2]}.py"
        path.write_text(changed_text(module, changes))
        spec = spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = loaded = module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return import_module(COPY_FILE).copy_kernel


def place_of(buffer: str) -> int:
    """Where a buffer begins in a rank's memory, in ints; signals stand behind all buffers."""
    return BUFFERS.index(buffer) * BUFFER_INTS if buffer in BUFFERS else len(BUFFERS) * BUFFER_INTS


def given(rank: int) -> torch.Tensor:
    """What a rank has in the beginning `[ROWS, ROW_INTS]`."""
    return torch.arange(BUFFER_INTS, dtype=torch.int32).reshape(ROWS, ROW_INTS) + (rank + 1) * 100_000


class Call(NamedTuple):
    """A launch's arguments, in order, and its blocks. report: of void waits, of which the kernel knows the address."""

    arguments: tuple[Any, ...]
    blocks: int
    report: torch.Tensor


def call_of(launch: Launch, memory: torch.Tensor, addresses: Sequence[int]) -> Call:
    """memory: the rank's own `[RANK_INTS]`, int32; addresses: where that of each rank lies for this process."""
    rows, places = [], []
    for at, move in enumerate(launch.moves):
        to, buffer, row = move.target
        rows.append(TileRow(COPY, row, row + move.rows, 0, WORKSPACE, move.source_row, *move.waits, 1, move.signal, at))
        places.append((addresses[to] + 4 * place_of(buffer), addresses[move.tells] + 4 * place_of("signals")))

    def on_device(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=memory.device)

    report = on_device([0] * 8)
    limits = on_device([WAIT_NS, report.data_ptr()], torch.int64)
    queue = LaunchTiles(on_device(rows), on_device([0]), on_device([0], torch.int64), len(rows))
    protocol = SignalWords(memory[place_of("signals") :], on_device([0] * SIGNAL_INTS), limits, 0)
    constants = (BLOCK_INTS, False, False, False)  # by loads and stores; bulk copies are inline assembly
    source = memory[place_of(launch.source) :]
    values = (on_device(places, torch.int64), source, queue, protocol, ROW_INTS // INTS_OF_A_WORD, *constants)
    return Call(values, min(BLOCKS, len(rows)), report)


def wrong_values(program: str, rank: int, memory: torch.Tensor) -> str:
    """What a rank holds in the end that it should not, or nothing."""
    held = {name: memory[place_of(name) :][:BUFFER_INTS].reshape(ROWS, ROW_INTS).cpu() for name in BUFFERS}
    half = torch.cat([given(0)[: ROWS // 2], given(1)[ROWS // 2 :]])
    expected: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
        "relay": ({"echo": given(0), "out": given(0)}, {"received": given(0)}),
        "pairs": ({}, {"out": given(0)}),
        "reuse": ({}, {"out": given(0), "echo": given(0)}),
        "halves": ({}, {"out": half}),
    }
    return ", ".join(name for name, value in expected[program][rank].items() if not torch.equal(held[name], value))

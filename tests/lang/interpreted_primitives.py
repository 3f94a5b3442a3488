"""Every tile primitive between real processes, interpreted; what is broken ends with a typed error, in bounded time.

Run by test_primitives.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import triton  # noqa: E402

import overweave as ow  # noqa: E402
from overweave.errors import InputError, PeerError, RankMismatch, WorkspaceBroken  # noqa: E402
from overweave.lang.arguments import Channel  # noqa: E402
from overweave.lang.mapping import TileChannel, Tiles  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.ops.author.tile_program import SymmetricBuffer, TileCall, TileProgram  # noqa: E402
from overweave.ops.workspace import reset  # noqa: E402
from overweave.runtime.host.processes import RanksFailed  # noqa: E402
from tests.lang import primitive_kernels as kernels  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

ROWS, COLS = 22, 12
NOTHING, DROPPED, WRONG_TILE, NO_TILE = range(4)
LATE_S = 1.5  # the group's timeout where something is broken
CHANNELS = [
    TileChannel(Tiles(24, 8, 4, 8, 2)),
    TileChannel(Tiles(24, 12, 4, 8, 2), Tiles(24, 12, 8, 4, 2), channels=3),
    TileChannel(Tiles(23, 12, 2, 8, 3), Tiles(23, 12, 4, 16, 3), channels=2),
    TileChannel(Tiles(9, 20, 2, 4, 4), channels=2, has_peers=True),
    TileChannel(Tiles(5, 4, 4, 4, 4), channels=3),
    TileChannel(Tiles(64, 4, 4, 4, 4), Tiles(64, 4, 16, 4, 4), channels=4),
]


def mapped(channel: TileChannel, is_dynamic: bool) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """What the device says of every tile."""
    nothing = torch.zeros(1, dtype=torch.int32)
    made, read = torch.zeros(channel.tiles.count, 5), torch.zeros(channel.consumed.count, 5)
    made, read, counted = (x.int() for x in (made, read, torch.zeros(channel.counters)))
    tables: list[torch.Tensor | None] = [None, None, None]
    if is_dynamic:
        counts = [channel.count_of(counter) for counter in range(channel.counters)]
        rows = (channel.producer_table(), channel.consumer_table(), counts)
        tables = [torch.tensor(table, dtype=torch.int32) for table in rows]
    argument = Channel(nothing, nothing.long(), nothing, nothing.long(), *tables, 0, 0, channel)  # type: ignore[call-arg]
    sizes = channel.tiles.count, channel.consumed.count, channel.counters
    kernels.mapping_kernel[(1,)](argument, made, read, counted, *sizes)
    return made.tolist(), read.tolist(), counted.tolist()


@pytest.mark.parametrize("channel", CHANNELS, ids=str)
def test_the_device_maps_tiles_as_the_host_does_and_static_is_dynamic(channel: TileChannel):
    tiles, consumed = channel.tiles, channel.consumed
    made = [
        [*tiles.rows_of(tile), tiles.rank_of(tile), channel.counter_of(tile), tile % tiles.across * tiles.tile_cols]
        for tile in range(tiles.count)
    ]
    read = [
        [*consumed.rows_of(tile), *channel.counters_of(tile), tile % consumed.across * consumed.tile_cols]
        for tile in range(consumed.count)
    ]
    counted = [channel.count_of(counter) for counter in range(channel.counters)]
    for is_dynamic in (False, True):
        found = mapped(channel, is_dynamic)
        assert found[0] == made
        assert found[2] == counted
        for ours, theirs in zip(found[1], read, strict=True):
            if ours[0] < ours[1]:  # an empty tile waits for nothing, wherever that is
                assert ours == theirs
            else:
                assert ours[2] == ours[3]
    owners = [
        sum(channel.counter_of(tile) == counter for tile in range(tiles.count)) for counter in range(len(counted))
    ]
    assert owners == counted


def matrix(call: int, rank: int = 0) -> torch.Tensor:
    return torch.arange(ROWS * COLS, dtype=torch.float32).view(ROWS, COLS) + 1000 * call + 7 * rank


def nan(rows: int = ROWS) -> torch.Tensor:
    return torch.full((rows, COLS), torch.nan)


def gather(fault: int = NOTHING, is_dynamic: bool = False) -> float:
    """The seconds that the calls took."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tiles = Tiles(ROWS, COLS, 2, 8, ranks)
    channel = TileChannel(tiles, Tiles(ROWS, COLS, 4, 16, ranks), channels=2)
    program = TileProgram({"whole": SymmetricBuffer(ROWS, COLS, torch.float32)}, {"gathered": channel})
    began_s = time.monotonic()
    for turn in range(3):
        x, out = nan(), nan()
        low, high = rank * tiles.shard_rows, min((rank + 1) * tiles.shard_rows, ROWS)
        x[low:high] = matrix(turn)[low:high]
        with program.call() as call:
            argument = call.channel("gathered")
            if is_dynamic:
                counts = [channel.count_of(counter) for counter in range(channel.counters)]
                tables = (channel.producer_table(), channel.consumer_table(), counts)
                argument = call.channel("gathered", *(torch.tensor(table, dtype=torch.int32) for table in tables))
            grid = 1 + channel.consumed.count
            call.launch(kernels.gather_kernel, grid, argument, call.tensor("whole"), x, out, ROWS, COLS, fault)
        assert torch.equal(out, matrix(turn)), f"rank {rank}, call {turn}"
    return time.monotonic() - began_s


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_push_and_broadcast_through_static_and_dynamic_mappings(ranks: int, is_dynamic: bool):
    run_ranks(gather, ranks, NOTHING, is_dynamic)


def scatter() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tiles = Tiles(ROWS, COLS, 4, 8, ranks)
    channels = {"other": TileChannel(tiles), "partial": TileChannel(tiles, channels=2)}
    program = TileProgram({"slots": SymmetricBuffer(ROWS, COLS, torch.float32)}, channels)
    low, high = rank * tiles.shard_rows, min((rank + 1) * tiles.shard_rows, ROWS)
    for turn in range(3):
        out = nan()
        with program.call() as call:
            channel, slots = call.channel("partial"), call.tensor("slots")
            call.launch(kernels.scatter_kernel, tiles.count, channel, slots, matrix(turn, rank), out, COLS)
        if rank:
            assert torch.equal(out[low:high], (matrix(turn, rank) + matrix(turn, rank - 1))[low:high])
        assert out[:low].isnan().all()


def test_p2p_goes_to_the_owner_alone():
    run_ranks(scatter, 3)


def pull(fault: int = NOTHING, is_ready: bool = True) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tiles = Tiles(ROWS - 1, COLS, 4, 8, ranks)  # the last shard is short
    shard = tiles.shard_rows
    channels = {"ready": TileChannel(Tiles(ranks, 1, 1, 1, ranks)), "pulled": TileChannel(tiles)}
    program = TileProgram({"shards": SymmetricBuffer(shard, COLS, torch.float32, is_shard=True)}, channels)
    whole = [matrix(turn)[: ROWS - 1] for turn in range(3)]
    for turn in range(3):
        mine = torch.zeros(shard, COLS)
        own = whole[turn][rank * shard : (rank + 1) * shard]
        mine[: len(own)] = own
        out, total = nan(ROWS - 1), nan(ROWS - 1)
        with program.call() as call:
            call.rank_copy_data(mine, call.part("shards"))
            if is_ready:
                call.rank_notify("ready", rank, "broadcast")
            arguments = (call.channel("ready"), call.channel("pulled"), call.tensor("shards"), out, total, COLS, fault)
            call.launch(kernels.pull_kernel, 1 + tiles.count, *arguments)
        assert torch.equal(out, whole[turn])
        parts = [torch.cat([whole[turn], torch.zeros(shard, COLS)])[r * shard : (r + 1) * shard] for r in range(ranks)]
        summed = sum(parts)
        assert isinstance(summed, torch.Tensor)
        expected = torch.cat([summed] * ranks)[: ROWS - 1] + whole[turn]
        assert torch.equal(total, expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_pull_from_the_owner_and_from_all(ranks: int):
    run_ranks(pull, ranks)


def relay(fault: int = NOTHING) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    channel = TileChannel(Tiles(4, 8, 4, 4, ranks), has_peers=True)
    program = TileProgram({"tensor": SymmetricBuffer(4, 8, torch.float32)}, {"ring": channel})
    for turn in range(3):
        start = torch.full((4, 8), float(turn))
        with program.call() as call:
            if rank == 0:
                call.rank_copy_data(start, call.part("tensor"))
            call.launch(kernels.relay_kernel, 2, call.channel("ring"), call.tensor("tensor"), fault)
            found = torch.empty(4, 8)
            call.rank_copy_data(call.part("tensor"), found)
        assert (found[:1] == turn + 1 + rank).all(), (rank, found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_hand_a_tile_on(ranks: int):
    run_ranks(relay, ranks)


def copy(is_push: bool, is_told: bool = True) -> None:
    """All-gather by copy engine: pull behind rank_wait, or broadcast."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tiles = Tiles(ROWS, COLS, -(-ROWS // ranks), 16, ranks)
    consumed = Tiles(ROWS, COLS, 4, 16, ranks)
    channels = {"ready": TileChannel(tiles), "gathered": TileChannel(tiles, consumed)}
    program = TileProgram({"whole": SymmetricBuffer(ROWS, COLS, torch.float32)}, channels)
    for turn in range(3):
        out = nan()
        with program.call() as call:
            own = slice(*tiles.rows_of(rank))
            call.rank_copy_data(matrix(turn)[own], call.part("whole")[own])
            call.rank_notify("gathered", rank, rank)
            copies = call.queue("copies")
            if is_push:
                copies.rank_copy_data(matrix(turn)[own], call.part("whole")[own], mode="broadcast")
                for peer in range(ranks):
                    if is_told and peer != rank:
                        copies.rank_notify("gathered", rank, peer)
            else:
                call.rank_notify("ready", rank, "broadcast")
                for peer in ((rank + step) % ranks for step in range(1, ranks)):
                    rows = slice(*tiles.rows_of(peer))
                    copies.rank_wait("ready", peer)
                    copies.rank_copy_data(call.part("whole", peer)[rows], call.part("whole")[rows])
                    if is_told:
                        copies.rank_notify("gathered", peer, rank)
            grid = consumed.count
            call.launch(kernels.arrived_kernel, grid, call.channel("gathered"), call.tensor("whole"), out, COLS)
        assert torch.equal(out, matrix(turn))


@pytest.mark.parametrize("is_push", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_copy_engine_pulls_and_broadcasts(ranks: int, is_push: bool):
    run_ranks(copy, ranks, is_push)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (gather, (DROPPED,)),
        (gather, (WRONG_TILE,)),
        (gather, (NO_TILE,)),
        (pull, (DROPPED,)),
        (pull, (NOTHING, False)),
        (relay, (DROPPED,)),
        (relay, (WRONG_TILE,)),
        (copy, (False, False)),
        (copy, (True, False)),
    ],
)
def test_what_is_not_told_ends_with_a_typed_error_in_bounded_time(function: object, arguments: tuple[object, ...]):
    began_s = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        run_ranks(function, 2, *arguments, group_timeout_s=LATE_S)
    assert time.monotonic() - began_s < 4 * LATE_S
    assert {outcome.error for outcome in raised.value.outcomes} == {"PeerTimeout"}


def recover() -> str:
    tiles = Tiles(ROWS, COLS, 16, 16, 2)
    program = TileProgram({"whole": SymmetricBuffer(ROWS, COLS, torch.float32)}, {"gathered": TileChannel(tiles)})

    def arrive(is_told: bool) -> torch.Tensor:
        out = nan()
        with program.call() as call:
            call.rank_copy_data(matrix(0), call.part("whole"))
            for tile in (0, 1) if is_told else (0,):
                call.rank_notify("gathered", tile, call.rank)
            call.launch(kernels.arrived_kernel, 2, call.channel("gathered"), call.tensor("whole"), out, COLS)
        return out

    assert torch.equal(arrive(True), matrix(0))
    try:
        arrive(False)
    except PeerError as error:
        said = str(error)
    with pytest.raises(WorkspaceBroken):
        arrive(True)
    reset()
    assert torch.equal(arrive(True), matrix(0))
    return said


def test_a_failed_call_names_the_kernel_and_the_counter_and_after_a_reset_all_is_well():
    for said in run_ranks(recover, 2, group_timeout_s=LATE_S):
        assert "arrived_kernel did not end; counter 1 of channel gathered is not full, expected 1, seen 0" in said


def is_refused(program: TileProgram, offend: Callable[[TileCall], object]) -> bool:
    try:
        with program.call() as call:
            offend(call)
    except InputError:
        return True
    return False


def bad_input() -> None:
    group = resolve(None)
    tiles = Tiles(8, 8, 4, 8, 2)
    buffers, channels = (
        {"b": SymmetricBuffer(8, 8, torch.float32)},
        {"c": TileChannel(Tiles(8, 8, 4, 4, 2)), "d": TileChannel(tiles, channels=2)},
    )
    program = TileProgram(buffers, channels)
    offences = (
        lambda call: call.channel("x"),
        lambda call: call.tensor("x"),
        lambda call: call.part("b", 2),
        lambda call: call.part("b")[::2],
        lambda call: call.rank_notify("c", 0, 0),  # two tiles share the counter
        lambda call: call.rank_notify("d", 4, 0),
        lambda call: call.rank_notify("d", 0, 2),
        lambda call: call.rank_wait("d", -1),
        lambda call: call.rank_copy_data(torch.zeros(8, 4), call.part("b")),
        lambda call: call.rank_copy_data(torch.zeros(8, 8).t()[:, ::2], call.part("b")),
        lambda call: call.rank_copy_data(torch.zeros(8, 8, dtype=torch.int32), call.part("b")),
        lambda call: call.rank_copy_data(call.part("b"), torch.zeros(8, 8), mode="broadcast"),
        lambda call: call.queue("side").rank_copy_data(torch.zeros(8, 8), call.part("b")),
        lambda call: call.launch(kernels.relay_kernel, 1, call.part("b", 1 - call.rank)),
        lambda call: call.launch(triton.autotune([triton.Config({})], [])(kernels.relay_kernel), 1),
        lambda call: call.launch(bad_input, 1),
        lambda call: call.channel("c", consumer_table=torch.zeros(4, 5)),
        lambda call: call.channel("c", producer_table=torch.zeros(4, 5, dtype=torch.int32)),
        lambda call: call.channel("c", consumer_table=[[0, 8, 0, 0, 1]]),
        lambda call: call.tensor(["b"]),
        lambda call: call.part("b", "0"),
        lambda call: call.part("b")[0],
        lambda call: call.part("b")["0":4],
        lambda call: call.rank_notify("d", "0", 0),
        lambda call: call.rank_copy_data([[0.0]], call.part("b", 1)),
        lambda call: call.launch(kernels.relay_kernel, "many", 0, 0, 0),
        lambda call: call.launch(kernels.relay_kernel, (1, 1, 1, 1), 0, 0, 0),
        lambda call: call.launch(kernels.relay_kernel, 1),
        lambda call: call.launch(kernels.relay_kernel, 1, 0, 0, 0, no_such_option=1),
    )
    for number, offend in enumerate(offences):
        assert is_refused(program, offend), f"offence {number} was not seen"
    for wrong_buffers, wrong_channels, device in (
        ({}, {"c": TileChannel(Tiles(8, 8, 4, 8, 3))}, None),
        (None, {}, None),
        ({}, [1], None),
        ({1: SymmetricBuffer(8, 8, torch.float32)}, {}, None),
        ({"b": SymmetricBuffer("8", 8, torch.float32)}, {}, None),
        ({"b": SymmetricBuffer(8, 8, "float32")}, {}, None),
        ({"b": SymmetricBuffer(8, 8, torch.float32)}, {}, "cpu"),
    ):
        with pytest.raises(InputError):
            TileProgram(wrong_buffers, wrong_channels, device=device)
    with pytest.raises(RankMismatch):
        TileProgram({"b": SymmetricBuffer(8, 8 + group.rank, torch.float32)}, channels)
    gather()


def test_bad_input_is_refused_on_every_rank_before_anything_runs():
    run_ranks(bad_input, 2)


def one_rank_refuses(is_typed: bool) -> str:
    tiles = Tiles(8, 8, 4, 8, 2)
    program = TileProgram({"b": SymmetricBuffer(8, 8, torch.float32)}, {"c": TileChannel(tiles)})
    try:
        with program.call() as call:
            if call.rank == 0:
                call.part("nothing") if is_typed else {}["nothing"]
            call.launch(kernels.arrived_kernel, 1, call.channel("c"), call.tensor("b"), torch.zeros(8, 8), 8)
    except (InputError, KeyError) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("raised", [InputError, KeyError])
def test_peers_of_a_rank_that_refuses_hear_of_it(raised: type[Exception]):
    began_s = time.monotonic()
    found = run_ranks(one_rank_refuses, 2, raised is InputError, group_timeout_s=20)
    assert found == [raised.__name__, "RankMismatch"]
    assert time.monotonic() - began_s < 10


def test_a_mapping_that_cannot_be_is_refused():
    for numbers in ((0, 1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 1, 0), ("1", 1, 1, 1), (1.0, 1, 1, 1)):
        with pytest.raises(InputError):
            Tiles(*numbers)
    for tiles, options in (
        (Tiles(1, 1, 1, 1), {"channels": 0}),
        (Tiles(1, 1, 1, 1), {"channels": "1"}),
        (Tiles(1, 1, 1, 1), {"consumer": 1}),
        (None, {}),
    ):
        with pytest.raises(InputError):
            TileChannel(tiles, **options)
    assert ow.Tiles is Tiles

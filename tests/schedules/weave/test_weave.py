"""Woven schedules: proven as they are, refuted without any one of their waits, and minimal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

import overweave as ow
from campaigns.oracle.fewer_waits import is_proven
from overweave.errors import InputError, OverweaveError, ScheduleError
from overweave.ir.footprint import Axis, Dim, Operand, TileSpace
from overweave.ir.plan import Plan
from overweave.ir.schedule import Apply, Put, Wait
from overweave.ir.text.files import from_json, to_json
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.tile_order import APPLY, COPY, NO_SIGNAL, OWN_SHARD, PART, TileRow
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ir.verify.rules.author_tables import check_slices
from overweave.ir.verify.rules.verdict import Findings
from overweave.schedules.weave.author_plan import author_plan
from overweave.schedules.weave.exchange import LEAST_SLICE
from overweave.schedules.weave.transports import legal, transports, wanted_of
from tests.plans import rules, with_operations
from tests.tile_spaces import BLOCK, attention, matmul

PUSH, PULL, LIBRARY = "all_gather.push pieces=2", "all_gather.pull order=all_peers", "all_gather.collective"
EXCHANGED = {"A": "all_to_all.receive pieces=2", "C": "all_to_all.send pieces=2"}
SCATTER = "reduce_scatter.scatter pieces=2"


def plans(world_size: int) -> Iterator[Plan]:
    """Every transport, and several at once; gathers also with shards that are no whole blocks."""
    whole, ragged = matmul(2 * BLOCK * world_size), matmul(100)
    for name, transport in transports().items():
        tensor = "A" if transport.side == "gather" else "C"
        yield author_plan(whole, {tensor: name}, world_size, "bfloat16")
        if not transport.is_traded:
            yield author_plan(ragged, {tensor: name}, world_size, "bfloat16")
    for wanted in ({"A": PUSH, "C": SCATTER}, {"A": PULL, "C": "reduce_scatter.ring"}, {"A": PUSH, "B": LIBRARY}):
        yield author_plan(whole, wanted, world_size, "bfloat16")
    for wanted in ({"A": PUSH}, {"A": PULL}, {"A": PUSH, "C": SCATTER}, EXCHANGED):
        yield author_plan(whole, wanted, world_size, "bfloat16", dual_source="A")
    moved = "all_gather.push mover=copy_kernel pieces=2"
    yield author_plan(ragged, {"A": moved}, world_size, "bfloat16")
    yield author_plan(whole, {"A": moved, "C": SCATTER}, world_size, "bfloat16", dual_source="A")
    for how in (PUSH, PULL, LIBRARY):
        yield author_plan(attention(2 * BLOCK * world_size), {"K": how, "V": how}, world_size, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_plan_is_proven_and_is_data(world_size: int):
    for plan in plans(world_size):
        verify_plan(plan, MachineLimits()).raise_if_refused()
        assert from_text(to_text(plan.schedule)) == plan.schedule
        assert from_json(to_json(plan)) == plan


def test_parts_wait_for_all_tiles_of_a_push():
    moved, wide = "all_gather.push mover=copy_kernel pieces=2", attention(8 * BLOCK, width=4096)
    plan = author_plan(wide, {"K": moved, "V": "all_gather.push pieces=2"}, 4, "bfloat16")
    assert any(operation.instances > 1 for operation in plan.schedule.operations if operation.queue != "tiles")
    verify_plan(plan, MachineLimits()).raise_if_refused()


def test_parts_need_not_hear_of_what_the_library_has_brought():
    """It ends before the kernel starts; its signal is for the move behind it."""
    moves = (
        ow.Collective((ow.Chunk((0, BLOCK)), ow.Chunk((2 * BLOCK, 3 * BLOCK)))),
        ow.Put(0, 1, ow.Chunk((BLOCK, 2 * BLOCK)), after=((0, 0),)),
        ow.Put(1, 0, ow.Chunk((3 * BLOCK, 4 * BLOCK))),
    )
    plan = author_plan(attention(4 * BLOCK), {"K": ow.Gather(2, moves), "V": LIBRARY}, 2, "bfloat16")
    assert any(step.queue == "main" and step.notifies for step in plan.schedule.of_rank(0))
    verify_plan(plan, MachineLimits()).raise_if_refused()


def test_moves_of_two_tensors_that_share_a_queue_imply_each_other_as_they_are_launched():
    """Both have lanes on the copy engine; a tile reads rows of all ranks of the narrow one."""
    wanted = {"A": "all_gather.double_ring", "B": "all_gather.islands"}
    verify_plan(author_plan(matmul(128, n=16), wanted, 4, "bfloat16"), MachineLimits()).raise_if_refused()


@pytest.mark.parametrize("how", [name for name, one in transports().items() if one.side != "gather"])
def test_the_library_may_gather_for_any_schedule_of_results(how: str):
    """By every back end: what runs beside the tiles must not keep the collective, which runs first, from the SMs."""
    movers = legal(how) if any(one.name == "mover" for one in transports()[how].options) else ("copy_engine",)
    for mover in movers:
        words = how if mover == "copy_engine" else f"{how} mover={mover}"
        plan = author_plan(matmul(96, k=64), {"A": LIBRARY, "C": words}, 3, "bfloat16")
        verify_plan(plan, MachineLimits()).raise_if_refused()


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
@pytest.mark.parametrize("how", ["all_gather.push", "all_gather.pull", "all_gather.push mover=copy_kernel"])
def test_a_tile_may_wait_for_all_peers(how: str, world_size: int):
    """Of what it reads whole, and of shards that are less than a tile: its own rank's rows are no gap."""
    whole = matmul(2 * BLOCK, k=64)
    whole = replace(whole, loads=(whole.loads[0], Operand("B", "b", (Dim(8 * world_size), Dim(64)))))
    for space, tensor in ((whole, "B"), (matmul(2 * world_size, k=64), "A")):
        plan = author_plan(space, {tensor: how}, world_size, "bfloat16")
        verify_plan(plan, MachineLimits()).raise_if_refused()


@pytest.mark.parametrize("how", ["all_to_all.send_collective", "all_to_all.send pieces=1"])
def test_a_tile_may_write_rows_of_two_ranks(how: str):
    """Of which one at most is announced: blocks are of 20 rows, the own one stays here."""
    plan = author_plan(matmul(40), {"C": how}, 2, "bfloat16")
    verify_plan(plan, MachineLimits()).raise_if_refused()
    assert any(
        len({made.tensor for made in one.makes}) > 1 for one in plan.schedule.of_rank(0) if isinstance(one, Apply)
    )


def test_tables_that_run_other_tiles_are_refuted():
    plan = author_plan(matmul(96), {"A": PUSH}, 2, "bfloat16")
    order = plan.tile_orders[0]
    first, second, *rest = order.rows
    for rows in (
        (first, first, *rest),
        (second, *rest),
        (first._replace(kind=PART), second, *rest),
        (*order.rows, first),
    ):
        broken = replace(plan, tile_orders=(replace(order, rows=tuple(rows)), plan.tile_orders[1]))
        assert not is_proven(broken)


def test_a_kernel_that_can_choose_reads_the_own_shard_in_place():
    staged, chosen = (author_plan(matmul(96), {"A": PUSH}, 3, "bfloat16", dual_source=name) for name in (None, "A"))
    copies = [[op.name for op in plan.schedule.operations if op.queue == "main"] for plan in (staged, chosen)]
    assert [len(names) for names in copies] == [3, 0]
    for rank, order in enumerate(chosen.tile_orders):
        own = [row for row in order.rows if row.source == OWN_SHARD]
        assert {row.row // 3 * BLOCK // 32 for row in own} == {rank}
        assert {row.source_row for row in own} == {32 * rank}
    ragged = author_plan(matmul(100), {"A": PUSH}, 3, "bfloat16", dual_source="A")
    assert all(row.source != OWN_SHARD for order in ragged.tile_orders for row in order.rows)
    order = chosen.tile_orders[1]
    for change in ({"source": 1}, {"source_row": 0}):
        rows = (order.rows[0]._replace(**change), *order.rows[1:])
        broken = (chosen.tile_orders[0], replace(order, rows=rows), chosen.tile_orders[2])
        assert not is_proven(replace(chosen, tile_orders=broken))


def test_each_tile_waits_for_the_rows_that_it_reads():
    """Against the definition: a tile of rows [lo, hi) needs every piece that has one of them, but for the own shard."""
    m, world_size = 100, 3
    space = matmul(m)
    plan = author_plan(space, {"A": PUSH}, world_size, "bfloat16")
    puts = {op.notifies[0].rank: [] for op in plan.schedule.operations if op.queue == "copies"}
    for op in plan.schedule.operations:
        if op.queue == "copies":
            (region,) = op.writes
            puts[region.rank].append((region.rows, op.notifies[0].signal))
    for rank, order in enumerate(plan.tile_orders):
        assert sorted(row.row for row in order.rows) == list(range(space.tile_count))
        for row in order.rows:
            lo = row.row // 3 * BLOCK
            hi = min(lo + BLOCK, m)
            reads = {signal for rows, signal in puts[rank] if max(rows[0], lo) < min(rows[1], hi)}
            waited = set(range(row.wait_lo, row.wait_hi)) | ({row.also} - {NO_SIGNAL})
            assert waited <= reads
            pieces = {signal // 2 for signal in reads}
            assert {signal // 2 for signal in waited} == pieces  # the last piece of a peer implies its first


def test_tiles_run_in_the_order_of_arrival():
    plan = author_plan(matmul(128), {"A": PUSH}, 4, "bfloat16")
    owners = [[row.row // 3 * BLOCK // 32 for row in order.rows] for order in plan.tile_orders]
    for rank, found in enumerate(owners):
        assert list(dict.fromkeys(found)) == [(rank + step) % 4 for step in range(4)]
    plan = author_plan(matmul(128), {"C": SCATTER}, 4, "bfloat16")
    for rank in range(4):
        found = [row.row // 3 * BLOCK // 32 for row in plan.tile_order(rank, "tiles").rows]
        assert list(dict.fromkeys(found)) == [(rank + step) % 4 for step in (1, 2, 3, 0)]


def test_a_wait_that_another_implies_is_left_out():
    """A tile over two pieces of one peer, which one queue sends in order, waits for the later one only."""
    space = replace(matmul(64), axes=(Axis("M", 64, 32), Axis("N", 48, BLOCK)))
    fine = author_plan(matmul(64), {"A": "all_gather.push pieces=2"}, 2, "bfloat16")
    coarse = author_plan(space, {"A": "all_gather.push pieces=2"}, 2, "bfloat16")
    assert {row.wait_hi - row.wait_lo for row in fine.tile_orders[0].rows if row.wait_hi} == {1}
    applies = [op for op in coarse.schedule.of_rank(0) if isinstance(op, Apply)]
    assert is_proven(coarse)
    assert all(len(op.waits) <= 1 for op in applies)


def test_parts_stand_behind_the_tiles_in_the_order_of_arrival():
    plan = author_plan(attention(96), {"K": PUSH, "V": PUSH}, 3, "bfloat16")
    for rank, order in enumerate(plan.tile_orders):
        kinds = [row.kind for row in order.rows]
        assert kinds == sorted(kinds)
        assert kinds.count(APPLY) == 4
        parts = [(row.row, row.row_end) for row in order.rows if row.kind == PART]
        assert parts[0] == (rank * 32, (rank + 1) * 32)
        assert [lo // 32 for lo, _ in parts] == [rank, *[(rank + s) % 3 for s in (1, 2) for _ in range(2)]]


def test_a_part_waits_for_signals_in_full_wherever_another_waits_for_them():
    """A kernel heeds neither of a part's signals where their range ends before it begins."""
    wanted = {"K": f"{PUSH} mover=tiles", "V": f"{PUSH} mover=tiles"}
    plan = author_plan(attention(1024, width=4096), wanted, 2, "bfloat16")
    order = plan.tile_orders[0]
    parts = [at for at, row in enumerate(order.rows) if row.kind == PART and row.wait_lo < row.wait_hi]
    own = next(at for at, row in enumerate(order.rows) if row.kind == PART and row.wait_lo == row.wait_hi)
    (first, second), rows = parts[:2], order.rows

    def with_rows(changed: dict[int, TileRow]) -> Plan:
        table = replace(order, rows=tuple(changed.get(at, row) for at, row in enumerate(rows)))
        return replace(plan, tile_orders=(table, *plan.tile_orders[1:]))

    more = rows[second]._replace(wait_lo=rows[first].wait_lo)
    assert is_proven(with_rows({second: more}))
    assert not is_proven(with_rows({second: more, first: rows[first]._replace(wait_count=0)}))
    assert not is_proven(with_rows({own: rows[own]._replace(wait_hi=-1)}))


def moved(scale: int, shift: int) -> TileSpace:
    return replace(matmul(96), loads=(Operand("A", "a", (Dim(96, "M", scale, shift), Dim(32))),))


def test_tiles_whose_rows_lie_beyond_the_tensor_wait_for_nothing():
    plan = author_plan(moved(1, -1), {"A": PUSH}, 2, "bfloat16")
    assert verify_plan(plan, MachineLimits()).ok
    idle = [one for one in plan.schedule.operations if isinstance(one, Apply) and not one.needs]
    assert idle
    assert not any(one.waits for one in idle)


@pytest.mark.parametrize(
    ("space", "wanted", "error", "found"),
    [
        (matmul(100), {"C": f"{SCATTER} mover=tiles"}, ScheduleError, "of the 100 rows of C"),
        (matmul(100), {"C": f"{SCATTER} mover=tiles"}, ScheduleError, "whole blocks of M: of 16 rows"),
        (
            replace(matmul(96), stores=(*matmul(96).stores, Operand("D", "d", (Dim(96, "M"), Dim(48, "N"))))),
            {"C": SCATTER, "D": SCATTER},
            ScheduleError,
            "a tile stores C and D, and can announce one",
        ),
        (replace(matmul(96), loads=(Operand("A", "a", (Dim(0), Dim(32))),)), {"A": PUSH}, InputError, "0 rows of 32"),
        (matmul(96), {"A": "all_gather.nowhere"}, InputError, "unknown"),
        (matmul(96), {"A": "all_gather.push pieces=0"}, InputError, "pieces"),
        (matmul(96), {"A": "all_gather.push pieces"}, InputError, "no option"),
        (matmul(96), {"A": SCATTER}, InputError, "stores C"),
        (matmul(96), {"D": PUSH}, InputError, "loads A, B"),
        (matmul(100), {"A": EXCHANGED["A"]}, InputError, "no whole blocks"),
        (moved(2, 1), {"A": PUSH}, ScheduleError, "no tile reads its rows"),
        (matmul(96), {}, InputError, "no tensor is exchanged"),
        (matmul(96), {"A": "all_gather.packed", "C": "reduce_scatter.packed"}, InputError, "those of one tensor"),
        (matmul(0), {"A": PUSH}, InputError, "no tiles"),
        (attention(72), {"K": PUSH, "V": PUSH}, ScheduleError, "begin inside a block"),
        (attention(96), {"K": PUSH, "V": "all_gather.push pieces=1"}, ScheduleError, "other parts"),
        (
            replace(matmul(96), stores=(Operand("C", "c", (Dim(96, "M"), Dim(48))),)),
            {"A": PUSH},
            ScheduleError,
            "along N all write C",
        ),
    ],
)
def test_what_cannot_be_woven_is_refused(space: TileSpace, wanted: dict[str, str], error: type[Exception], found: str):
    with pytest.raises(error, match=found):
        author_plan(space, wanted, 3, "bfloat16")


def test_a_schedule_alone_means_the_tensor_it_must_mean():
    assert wanted_of(["A", "B"], ["C"], PUSH) == {"A": PUSH}
    assert wanted_of(["A", "B"], ["C"], "reduce_scatter.ring") == {"C": "reduce_scatter.ring"}
    assert wanted_of(["A"], ["C"], {"A": " all_gather.push   pieces=02 "}) == {"A": "all_gather.push pieces=2"}
    for bad in ('all_gather.push """', "all_gather.push pieces=2 pieces=2", "", "x", {"A": SCATTER}, {'"': PUSH}):
        with pytest.raises(InputError):
            wanted_of(["A", "B"], ["C"], bad)


# Puts that tiles carry: proven on any ranks, refuted if a tile claims less than it must or waits before it sends.

BY_TILES, IN_BULK = "all_gather.push mover=tiles pieces=2", "all_gather.push mover=bulk_tiles order=all_peers"
RECEIVE = "all_to_all.receive mover=tiles"
WIDE = 4096  # elements of a row, so that a slice is a few rows


def plans_of_tiles(world_size: int) -> Iterator[Plan]:
    whole, ragged = matmul(2 * BLOCK * world_size, k=WIDE), matmul(100, k=WIDE)
    for space in (whole, ragged):
        for chosen in (None, "A"):
            yield author_plan(space, {"A": BY_TILES}, world_size, "bfloat16", dual_source=chosen)
    yield author_plan(whole, {"A": IN_BULK, "C": SCATTER}, world_size, "bfloat16", dual_source="A")
    yield author_plan(whole, {"A": BY_TILES, "B": "all_gather.collective"}, world_size, "bfloat16", dual_source="A")
    yield author_plan(whole, {"A": RECEIVE, "C": "all_to_all.send"}, world_size, "bfloat16", dual_source="A")
    long = attention(2 * BLOCK * world_size, width=WIDE)
    yield author_plan(long, {"K": BY_TILES, "V": BY_TILES}, world_size, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_plan_of_tiles_is_proven_and_is_data(world_size: int):
    for plan in plans_of_tiles(world_size):
        verify_plan(plan, MachineLimits()).raise_if_refused()
        assert from_json(to_json(plan)) == plan


def test_slices_are_counted_and_belong_to_the_queue_of_the_tiles():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", dual_source="A")
    puts = [one for one in plan.schedule.of_rank(0) if isinstance(one, Put)]
    rows = plan.tile_order(0, "tiles").rows
    assert {put.queue for put in puts} == {"tiles"}
    assert sum(put.instances for put in puts) == sum(row.kind == COPY for row in rows) > len(puts)
    waits: list[Wait] = [wait for one in plan.schedule.of_rank(1) if isinstance(one, Apply) for wait in one.waits]
    assert {wait.count for wait in waits} == {puts[0].instances}
    assert all((row.row_end - row.row) * WIDE >= LEAST_SLICE for row in rows if row.kind == COPY)
    verify_plan(plan, MachineLimits()).raise_if_refused()


def test_whoever_waits_has_claimed_what_peers_wait_for_alike():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 4, "bfloat16", dual_source="A")
    rows = [row for row in plan.tile_order(1, "tiles").rows if row.kind == APPLY]
    count = sum(row.kind == COPY for row in plan.tile_order(1, "tiles").rows)
    own = [row for row in rows if row.wait_lo == row.wait_hi]
    assert {(row.col, row.width) for row in own} == {(0, 1)}  # each moves one slice and waits for nothing
    claimed = [row.col for row in rows[:count]]
    assert claimed == sorted(claimed)
    assert not any(row.width for row in rows[count:])


def changed_row(plan: Plan, at: int, **fields: int) -> Plan:
    order = plan.tile_orders[0]
    rows = (*order.rows[:at], order.rows[at]._replace(**fields), *order.rows[at + 1 :])
    return replace(plan, tile_orders=(replace(order, rows=rows), *plan.tile_orders[1:]))


def test_a_table_that_moves_otherwise_is_refuted():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 4, "bfloat16", dual_source="A")
    rows = plan.tile_orders[0].rows
    waiting = next(at for at, row in enumerate(rows) if row.wait_lo < row.wait_hi and row.width)
    last = len(rows) - 1
    assert not rules(plan)
    assert rules(changed_row(plan, waiting, col=0)) == {"lowering"}
    assert rules(changed_row(plan, 0, width=0)) == {"lowering"}
    assert rules(changed_row(plan, last, row_end=rows[last].row_end - 1)) == {"lowering"}
    assert rules(changed_row(plan, last, signal=0)) == {"lowering"}
    order = plan.tile_orders[0]
    short = replace(plan, tile_orders=(replace(order, rows=rows[:-1]), *plan.tile_orders[1:]))
    assert "lowering" in rules(short)


def test_ranks_that_wait_before_they_send_hang():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", dual_source="A")
    applies = [one for one in plan.schedule.operations if isinstance(one, Apply)]
    puts = [one for one in plan.schedule.operations if isinstance(one, Put)]
    assert rules(with_operations(plan, (*applies, *puts))) == {"deadlock"}


def test_what_tiles_carry_waits_for_nothing():
    plan = author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", dual_source="A")
    waits = next(one.waits for one in plan.schedule.of_rank(0) if isinstance(one, Apply) and one.waits)
    last = [one for one in plan.schedule.of_rank(0) if isinstance(one, Put)][-1]
    late = replace(last, waits=waits)
    operations = tuple(late if one is last else one for one in plan.schedule.operations)
    assert rules(with_operations(plan, operations)) & {"engine", "deadlock"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"A": RECEIVE}, "no pointer"),
        ({"A": BY_TILES, "B": "all_gather.push mover=bulk_tiles"}, "bulk_tiles and tiles"),
        ({"A": "all_gather.push mover=copy_kernel", "B": "all_gather.push mover=bulk_kernel"}, "in bulk"),
        ({"A": "all_gather.push mover=copy_kernel", "B": "all_gather.push mover=copy_kernel"}, "it has one source"),
        ({"A": "all_gather.pull mover=tiles"}, "mover"),
    ],
)
def test_what_tiles_cannot_carry_is_refused(wanted: dict[str, str], found: str):
    with pytest.raises(OverweaveError, match=found):
        author_plan(matmul(128, n=128), wanted, 2, "bfloat16")


def test_rows_that_are_no_words_are_refused():
    with pytest.raises(InputError, match="72 bytes, and kernels move words of 16"):
        author_plan(matmul(128, k=36), {"A": BY_TILES}, 2, "bfloat16", dual_source="A")
    wide = author_plan(matmul(128, k=36), {"A": BY_TILES}, 2, "float32", dual_source="A")
    problem, realization = (replace(part, dtype="bfloat16") for part in (wide.problem, wide.realization))
    assert rules(replace(wide, problem=problem, realization=realization)) == {"alignment"}


def test_slices_that_no_tile_claims_are_refused():
    """Each tile claims one at least: of more than there are tiles, behind the last of them, nobody moves the rest."""
    tile = next(row for row in _plan().tile_order(0, "tiles").rows if row.kind == APPLY)
    for tiles, before, count, claimed in ((3, 0, 4, 3), (2, 4, 5, 4), (0, 0, 1, 0)):
        rows = [tile._replace(operation=0, col=before, width=1)] * tiles
        findings = Findings()
        check_slices(rows, {0: before}, count, findings)
        assert [f"claim {claimed} of {count} slices" in one.message for one in findings.refusals] == [True]
        check_slices(rows, {0: before}, claimed, findings)
        assert len(findings.refusals) == 1


def _plan() -> Plan:
    return author_plan(matmul(128, k=WIDE), {"A": BY_TILES}, 2, "bfloat16", dual_source="A")

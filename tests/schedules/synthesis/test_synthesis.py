"""Synthesized moves: every chunk everywhere once, over links that are there, proven, and near what links allow."""

from __future__ import annotations

import time

import pytest

from campaigns.choices.joined_machines import joined_by, mesh, ring, scattered_pairs, tree
from campaigns.choices.lowered import machines as machines_by_name
from campaigns.choices.lowered import synthesis
from overweave.errors import InputError, MachineFileError
from overweave.hardware.machine import Machine, load
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.moves.gather_templates import Mesh, gather_of
from overweave.schedules.moves.moves import Put
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.schedules.synthesis import search
from overweave.schedules.synthesis.links import gather_bound_us, joined
from overweave.schedules.synthesis.search import Transfer, gathered, traded
from overweave.schedules.synthesis.templates import all_to_all_on, gather_on, scatter_on, united
from overweave.tuner.space.space import candidates, full_options, reason_unsupported
from overweave.tuner.space.target import target_named
from tests.clock import slowness

MIB = 1 << 20
MACHINES = [mesh(), ring(), ring(is_broken=True), mesh(without=(0, 5)), tree(8), scattered_pairs(), load("h100_nvlx8")]
NAMES = ["mesh", "ring", "chain", "missing", "tree", "scattered", "levels"]
machines = pytest.mark.parametrize("machine", MACHINES, ids=NAMES)


def ends_us(transfers: tuple[Transfer, ...]) -> float:
    return max(one.end_us for one in transfers)


@machines
def test_every_chunk_comes_once_from_a_rank_that_has_it(machine: Machine):
    ranks, pieces = 8, 2
    has_us = {(owner, owner * pieces + piece): 0.0 for owner in range(ranks) for piece in range(pieces)}
    near = joined(machine, ranks).near
    for one in gathered(machine, ranks, pieces, MIB):
        assert has_us[one.source, one.chunk] <= one.begin_us + search.SOON
        assert (one.target, one.chunk) not in has_us
        assert (one.source, one.target) in near
        has_us[one.target, one.chunk] = one.end_us
    assert len(has_us) == ranks * ranks * pieces


@machines
def test_links_bound_a_search_from_below(machine: Machine):
    found_us, least_us = ends_us(gathered(machine, 8, 4, 16 * MIB)), gather_bound_us(machine, 8, 64 * MIB)
    assert least_us < found_us < 1.6 * least_us


def test_bounds_are_those_of_the_slowest_cut():
    rate = 64e3  # bytes/us of a link of mi300x8
    assert gather_bound_us(ring(), 8, rate) == pytest.approx(7 / 2)  # two links into a GPU
    assert gather_bound_us(ring(is_broken=True), 8, rate) == pytest.approx(7)  # one into the last
    assert gather_bound_us(tree(8), 8, rate) == pytest.approx(7)
    assert gather_bound_us(scattered_pairs(), 8, 63e3) == pytest.approx(6 / 2)  # six shards over a pair's two bridges


def test_a_missing_link_costs_what_it_carried():
    """Its bytes go by six others: less than the detour of one, which would double them."""
    whole_us = ends_us(gathered(mesh(), 8, 6, 16 * MIB))
    assert ends_us(gathered(mesh(without=(0, 5)), 8, 6, 16 * MIB)) == pytest.approx(7 / 6 * whole_us, rel=0.01)


def test_a_piece_is_cut_for_several_ways_and_goes_whole_over_one():
    """Six ranks pass on parts of the shards that the missing link would have carried; all others are one copy each."""
    moves = list(gather_on(mesh(without=(0, 5)))(Mesh(rows=8 * 48, cols=1 << 20, world_size=8)))
    rows = {move: move.chunk.rows[1] - move.chunk.rows[0] for move in moves}
    assert sorted(rows.values()) == [8] * 12 + [48] * (8 * 7 - 2)
    assert {move.rank for move in moves if rows[move] == 8 and move.peer == 5} == {1, 2, 3, 4, 6, 7}


def test_tiles_still_wait_for_pieces():
    cut = Mesh(rows=8 * 48, cols=1 << 20, world_size=8, pieces=4)
    assert {move.chunk.rows[1] - move.chunk.rows[0] for move in gather_on(mesh())(cut)} == {12}


def test_a_copy_of_several_parts_holds_nothing_up():
    """Parts of which one is passed on at once, or not there as the first one leaves, stay copies of their own."""
    for machine in MACHINES:
        forth = gathered(machine, 8, 4, 16 * MIB)
        leaves_us = {(one.source, one.chunk): one.begin_us for one in reversed(forth)}
        has_us = {(one.target, one.chunk): one.end_us for one in forth}
        copies = united(forth, 4)
        assert sum(one.length for one in copies) == len(forth)
        for one in (one for one in copies if one.length > 1):
            for chunk in range(one.chunk, one.chunk + one.length):
                assert leaves_us.get((one.target, chunk), one.end_us) >= one.end_us - search.SOON
                assert has_us.get((one.source, chunk), 0.0) <= one.begin_us + search.SOON


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "mesh less a link"])
def test_searched_ways_beat_those_by_hand(name: str):
    found = synthesis(name, machines_by_name()[name], (1, 2))
    assert found.by_hand_us > 1.2 * found.searched_us
    assert found.searched_us > found.bound_us


def test_each_chunk_enters_a_pair_once():
    """What one of two GPUs has, or gets, comes to the other over NVLink."""
    partner = {rank: (rank + 4) % 8 for rank in range(8)}
    entered = [
        (one.target % 4, one.chunk)
        for one in gathered(scattered_pairs(), 8, 2, MIB)
        if one.source != partner[one.target]
    ]
    assert len(entered) == len(set(entered)) == 4 * 6 * 2


@pytest.mark.parametrize("ranks", range(1, 9))
def test_moves_are_proven_for_uneven_and_empty_shards(ranks: int):
    for machine in (ring(is_broken=True), scattered_pairs()):
        for rows in (0, 3, 37):
            cut = Mesh(rows=rows, cols=8, world_size=ranks, pieces=2)
            transferred(gather_of(gather_on(machine), cut), rows, 8)
    for name in ("all_gather_matmul.synth", "matmul_reduce_scatter.synth", "all_to_all_matmul.synth"):
        for links in ("h100_nvlx8",):
            problem = Problem(
                operator=name.partition(".")[0], m=ranks * 40, n=16, k=16, world_size=ranks, dtype="bfloat16"
            )
            verify_plan(build(name, problem, {"links": links}), MachineLimits()).raise_if_refused()


def test_sums_go_the_ways_of_the_gather_backwards():
    cut = Mesh(rows=64, cols=8, world_size=8)
    forth = [(move.rank, move.peer, move.chunk) for move in gather_on(ring())(cut)]
    back = [(move.peer, move.rank, move.chunk) for move in scatter_on(ring())(cut) if isinstance(move, Put)]
    assert sorted(map(str, forth)) == sorted(map(str, back))


def test_an_all_to_all_is_served_without_two_copies_on_a_link():
    machine, free = tree(8), joined(tree(8), 8).shares
    events = [
        (time_us, sign, one)
        for one in traded(machine, 8, 1, MIB)
        for time_us, sign in ((one.begin_us, 1), (one.end_us, -1))
    ]
    for _, sign, one in sorted(events, key=lambda each: (round(each[0], 6), each[1])):
        for link, taken in joined(machine, 8).routes[one.source, one.target].takes.items():
            free[link] -= sign * taken * search.LEAST_SHARE
            assert free[link] > -1e-6
    assert len(all_to_all_on(machine, Mesh(rows=64, cols=8, world_size=8)).moves) == 56


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine", [pytest.param(mesh(64), marks=pytest.mark.nightly), tree(64, 8)], ids=["mesh", "tree"]
)
def test_sixty_four_ranks_take_less_than_ten_seconds(machine: Machine):
    begin_s = time.process_time()
    found = gathered(machine, 64, 1, MIB)
    assert time.process_time() - begin_s < 10 * slowness()
    assert len(found) == 64 * 63


def test_a_search_is_kept():
    assert gathered(mesh(), 8, 2, MIB) is gathered(mesh(), 8, 2, MIB)
    assert search._Pass(joined(ring(), 8), 2, MIB, 9).run() == search._Pass(joined(ring(), 8), 2, MIB, 9).run()


def test_the_tuner_tries_it_where_links_are_no_switch():
    tried = next(one for one in candidates("all_gather_matmul") if one.plan == "synth")
    problem = Problem(operator="all_gather_matmul", m=8192, n=1024, k=4096, world_size=8, dtype="bfloat16")
    pairs, switch = target_named("h100_nvlx8", 8), target_named("h200x8", 8)
    assert not reason_unsupported(problem, pairs, tried)
    assert full_options(problem, pairs, tried)["links"] == "h100_nvlx8"
    assert "nothing to search" in reason_unsupported(problem, switch, tried)
    assert "links" not in full_options(problem, switch, tried)
    assert not obstacle(MethodRequest(problem), METHODS["all_gather_matmul.synth"])


def test_what_cannot_be_searched_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"9 ranks on full_mesh8: it has 8 GPUs. Ask for fewer ranks"):
        gathered(mesh(), 9, 1, MIB)
    alone = joined_by("levels", [(0, 1), (1, 2)], 4)
    with pytest.raises(MachineFileError, match=r"no route from GPU 0 to GPU 3"):
        gathered(alone, 4, 1, MIB)
    problem = Problem(operator="all_gather_matmul", m=64, n=16, k=16, world_size=2000, dtype="bfloat16")
    with pytest.raises(InputError, match="ranks"):
        build("all_gather_matmul.synth", problem, {"links": "mi300x8"})


def test_a_wrong_ways_gather_is_refused():
    """The proof would see a search that sends what is not there."""
    cut = Mesh(rows=64, cols=8, world_size=8)
    moves = list(gather_of(gather_on(ring()), cut).moves)
    with pytest.raises(Exception, match="neither its own nor has it all arrived"):
        transferred(gather_of(lambda _: iter(moves[::-1]), cut), 64, 8)  # type: ignore[arg-type, return-value]


def test_a_schedule_is_proven_on_its_own():
    problem = Problem(operator="all_gather_matmul", m=64, n=16, k=16, world_size=8, dtype="bfloat16")
    assert verify_schedule(build("all_gather_matmul.synth", problem, {"links": "h100_pciex8"}).schedule).ok

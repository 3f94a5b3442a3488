"""Automatic schedules on paper: what the model says of a kernel's ways, and what cannot be left to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import overweave as ow
from overweave.errors import InputError
from overweave.ops.author import compile_auto
from overweave.ops.author.compile_auto import AutoFused, configs_of
from overweave.tuner.measure import trial
from overweave.tuner.measure.trial import TimedTrial
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow

MATMUL = f"{ROOT}/examples/kernels/matmul.py:matmul_kernel"
STRIDES = dict.fromkeys(("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"), 1)
NUMBERS = {"M": 2048, "N": 2048, "K": 4096, "BLOCK_K": 64, "GROUP_M": 8, **STRIDES}
CONFIGS = [{"BLOCK_M": 128, "BLOCK_N": block, "num_warps": 8} for block in (128, 256)]


@pytest.mark.parametrize(
    "schedule",
    [
        "all_gather.auto",
        "all_reduce.auto",
        {"C": "reduce_scatter.auto"},
        {"A": "all_to_all.auto", "C": "all_to_all.auto"},
    ],
)
def test_ways_are_ranked_on_paper(schedule: str | Mapping[str, str]):
    ranked = ow.compile_auto(MATMUL, schedule, configs=CONFIGS).rank(NUMBERS, 4)
    predicted = [each.predicted_us for each in ranked if each.predicted_us is not None]
    assert predicted == sorted(predicted)
    assert len(predicted) >= 4
    assert {dict(each.candidate.constants)["BLOCK_N"] for each in ranked} == {128, 256}
    assert any("collective" in str(each.candidate) for each in ranked)
    assert all(bool(each.obstacle) == (each.predicted_us is None) for each in ranked)


def left_open() -> ow.Reduction:
    """Every partial straight to its owner, by whatever back end is best."""
    moves = [
        ow.Put(rank, owner, ow.Chunk((512 * owner, 512 * owner + 512)), mover="auto")
        for step in (1, 2, 3)
        for rank in range(4)
        for owner in [(rank + step) % 4]
    ]
    return ow.Reduction(4, tuple(moves))


def test_moves_by_hand_leave_their_back_end_open():
    auto = ow.compile_auto(MATMUL, left_open(), configs=CONFIGS[:1])
    ranked = auto.rank(NUMBERS, 4)
    movers = {str(each.candidate.exchanges[0][1]): each for each in ranked}
    assert {"by_hand", "by_hand mover=copy_kernel", "by_hand mover=tiles"} <= movers.keys()
    assert "stored from registers" in movers["by_hand mover=bulk_tiles"].obstacle
    assert movers["by_hand mover=tiles"].predicted_us is not None
    wanted = auto.fused(movers["by_hand mover=tiles"].candidate).schedules["C"]
    assert isinstance(wanted, ow.Reduction)
    assert {move.mover for move in wanted.moves if isinstance(move, ow.Put)} == {"tiles"}


def test_what_is_not_left_open_stays():
    moves = tuple(replace(move, mover="copy_engine") for move in left_open().moves)
    ranked = ow.compile_auto(MATMUL, {"C": ow.Reduction(4, moves)}, configs=CONFIGS).rank(NUMBERS, 4)
    assert {each.candidate.exchanges for each in ranked} == {(("C", "by_hand"),)}


def test_chunk_schedules_of_sums_are_searched_with_their_back_ends():
    ways = [
        str(each.candidate)
        for each in ow.compile_auto(MATMUL, {"C": "reduce_scatter.auto"}).rank(
            {**NUMBERS, "M": 8192, "N": 3584, "BLOCK_M": 128, "BLOCK_N": 128}, 4
        )
    ]
    for words in (".mesh mover=tiles", ".mesh mover=copy_kernel", ".ring", ".double_ring", ".islands"):
        assert any(all(word in way for word in words.split()) for way in ways), words


def test_a_longer_tile_takes_longer():
    quick, slow = (ow.compile_auto(MATMUL, "all_reduce.auto", configs=CONFIGS[:1], tile_us=us) for us in (20, 80))
    assert quick.rank(NUMBERS, 4)[0].predicted_us + 50 < slow.rank(NUMBERS, 4)[0].predicted_us


def test_what_cannot_be_keeps_its_reason():
    ragged = {**NUMBERS, "M": 4100}
    ranked = ow.compile_auto(MATMUL, "reduce_scatter.auto", configs=CONFIGS).rank(ragged, 4)
    reasons = [each.obstacle for each in ranked if each.predicted_us is None]
    assert any("straddle" in reason for reason in reasons)


def test_a_way_that_is_predicted_can_be_called():
    """Rows of 8,200 bytes are no whole words, and kernels move words: that is the copy engine's, or the library's."""
    ragged = {**NUMBERS, "K": 4100} | dict(CONFIGS[0])
    auto = ow.compile_auto(MATMUL, "all_gather.auto")
    ranked = auto.rank(ragged, 4)
    assert any("words of 16" in each.obstacle for each in ranked)
    for each in ranked:
        if each.predicted_us is not None:
            auto.fused(each.candidate).plan(ragged, 4)
    assert ranked[0].predicted_us is not None


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        ({"A": "all_gather.auto", "D": "all_gather.auto"}, "reads A, B"),
        ({"C": "all_gather.auto"}, "reads A, B"),
        ("nothing.auto", "no such collective"),
        ("all_to_all.auto", "different things"),
        ({"A": "all_gather.auto pieces=2"}, "by this word alone"),
        ({"A": "all_gather.auto", "C": "reduce_scatter.sideways"}, "unknown"),
    ],
)
def test_what_cannot_be_left_to_it(schedule: str | Mapping[str, str], found: str):
    with pytest.raises(InputError, match=found):
        ow.compile_auto(MATMUL, schedule)


def test_compile_itself_wants_a_name():
    with pytest.raises(InputError, match="unknown"):
        ow.compile(MATMUL, "all_gather.auto")


def test_configs_are_given_or_the_autotuners():
    tuned = SimpleNamespace(configs=[SimpleNamespace(kwargs={"BLOCK_M": 64}, num_warps=8, num_stages=None)])
    assert configs_of(tuned, ()) == ((("BLOCK_M", 64), ("num_warps", 8)),)
    assert configs_of(tuned, [{"BLOCK_M": 32}]) == ((("BLOCK_M", 32),),)
    assert configs_of(object(), ()) == ((),)
    with pytest.raises(InputError, match="same names"):
        configs_of(None, [{"BLOCK_M": 64}, {"BLOCK_N": 64}])


@pytest.mark.parametrize(
    ("config", "found"),
    [({"BLOCK_X": 64}, "BLOCK_X is unknown"), ({"num_warps": 3}, "got 3"), ({"tile_group": 0}, "got 0")],
)
def test_a_config_that_no_call_could_have_is_refused_at_once(config: dict[str, int], found: str):
    with pytest.raises(InputError, match=found):
        ow.compile_auto(MATMUL, "all_gather.auto", configs=[config])


def auto() -> AutoFused:
    return ow.compile_auto(MATMUL, "all_gather.auto", configs=CONFIGS)


ARGUMENTS = {"a_ptr": None, "b_ptr": torch.zeros(4), "c_ptr": torch.zeros(4), **NUMBERS}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the peers are told."""
    told: list[str] = []

    def refuse(group: object, error: Exception) -> Exception:
        told.append(str(error))
        return error

    monkeypatch.setattr(compile_auto, "group_of", lambda group: SimpleNamespace(rank=0, world_size=4))
    monkeypatch.setattr(compile_auto, "refuse", refuse)
    return told


@pytest.mark.parametrize("call", [AutoFused.__call__, AutoFused.tune])
def test_peers_hear_of_a_call_without_what_is_exchanged(call: Callable[..., object], heard: list[str]):
    with pytest.raises(InputError, match="A is no tensor"):
        call(auto(), **ARGUMENTS)
    assert len(heard) == 1


def test_a_tuning_of_which_nothing_runs_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TimedTrial, "_attempt", lambda self, call, is_checked: "it is broken")
    group: Any = SimpleNamespace(rank=0, world_size=4)
    given = {**ARGUMENTS, "a_ptr": torch.zeros(512, 4096)}
    call = compile_auto._Call(auto(), group, (), given)
    with pytest.raises(InputError, match=r"none of \d+ ways runs.*it is broken"):
        call.autotuned(call.ranked())


def test_a_tuning_goes_on_around_what_was_best_and_times_the_last_few_anew(monkeypatch: pytest.MonkeyPatch):
    """With a timer that knows: a back end that the model likes less, in the constants that it likes less, wins."""
    asked: list[list[str]] = []

    def timer(calls: Mapping[str, object], *_: object) -> Any:
        asked.append(list(calls))
        us = {name: 100.0 - 20 * ("mover=tiles" in name) - 10 * ("BLOCK_N=128" in name) for name in calls}
        return SimpleNamespace(device_us={name: (took,) for name, took in us.items()})

    monkeypatch.setattr(TimedTrial, "_attempt", lambda self, call, is_checked: "")
    monkeypatch.setattr(trial, "compare", timer)
    group: Any = SimpleNamespace(rank=0, world_size=4, process_group=None)
    configs = [{"BLOCK_M": 128, "BLOCK_N": block, "num_warps": 8} for block in (256, 128)]
    fused = ow.compile_auto(MATMUL, "reduce_scatter.auto", configs=configs)
    given = {**ARGUMENTS, "a_ptr": torch.zeros(2048, 4096), "c_ptr": torch.zeros(512, 2048)}
    call = compile_auto._Call(fused, group, (), given)
    times = call.autotuned(call.ranked())
    assert "mover=tiles" in str(times[0].way)
    assert dict(times[0].way.constants)["BLOCK_N"] == 128
    assert len(asked[-1]) == 4
    assert len({one.way for one in times}) == len(times)
    assert len(asked) == 3

"""The space of compiled kernels, the search along it, and what is kept of a tuning."""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import Machine, load
from overweave.schedules.weave.transports import transports, wanted_of
from overweave.tuner.measure.compiled import (
    KernelWay,
    RankedWay,
    TimedWay,
    TunedTimes,
    content_key,
    families,
    is_auto,
    is_in_search_space,
    predicted_best,
    prediction_machine,
    rank_ways,
    read_tuning,
    refinements,
    save_tuning,
    shortlist,
    side_of,
    tuning_path,
)
from overweave.tuner.space.target import Target, target_named

ASKED = {"A": "all_gather.auto", "C": "reduce_scatter.scatter"}
CONFIGS = ((("BLOCK", 64),), (("BLOCK", 128),))
MACHINE = load("h200x4")


def test_a_collective_stands_for_all_its_schedules():
    found = [family.name for family in families("all_gather.auto")]
    assert found[0] == "all_gather.collective"
    named = {name for name in transports() if name.startswith("all_gather.")}
    assert set(found) == named - {"all_gather.synth"}  # which is written for links that a caller names
    assert [family.name for family in families("reduce_scatter.ring pieces=4")] == ["reduce_scatter.ring pieces=4"]
    with pytest.raises(InputError, match=r"all_reduce\.auto"):
        families("nothing.auto")
    assert is_auto("all_reduce.auto")
    assert not is_auto("all_reduce.two_shot")
    assert side_of("all_reduce.auto") == "scatter"


def test_every_member_can_be_asked_for_or_has_a_reason():
    for collective, tensor in (("all_gather", "A"), ("reduce_scatter", "C"), ("all_reduce", "C")):
        members = [member for family in families(f"{collective}.auto") for member in family.members()]
        refused = [member for member in members if "mover=" in member and _reason(tensor, member)]
        taken = [member for member in members if member not in refused]
        assert all(wanted_of(["A"], ["C"], {tensor: member}) == {tensor: member} for member in taken)


def _reason(tensor: str, member: str) -> str:
    try:
        wanted_of(["A"], ["C"], {tensor: member})
    except InputError as error:
        return error.found
    return ""


def predict(way: KernelWay, machine: Machine) -> float:
    """Pushes in four pieces are best; larger blocks are better still; one schedule cannot be."""
    how = dict(way.exchanges)["A"]
    if how.startswith("all_gather.pull"):
        raise ScheduleError("pull", "it cannot be", "")
    us = {"all_gather.collective": 100.0}.get(how.split()[0], 90.0)
    us -= 10.0 * how.startswith("all_gather.push") + 5.0 * ("pieces=4" in how) + dict(way.constants)["BLOCK"] / 64
    return us + 20.0 * ("mover" in how)


def test_the_search_goes_along_schedules_options_and_constants():
    judged = rank_ways(ASKED, CONFIGS, predict, MACHINE)
    assert str(judged[0].candidate) == "A=all_gather.collective; C=reduce_scatter.scatter; BLOCK=64"
    best = min((each for each in judged if each.predicted_us), key=lambda each: each.predicted_us or 0.0)
    assert str(best.candidate) == "A=all_gather.push pieces=4; C=reduce_scatter.scatter; BLOCK=128"
    assert predicted_best(judged) == best.candidate
    assert [each.obstacle for each in judged if "pull" in str(each.candidate)] == ["pull: it cannot be"]
    assert len(judged) < 60  # one option after the other: their product would be hundreds
    chosen = shortlist(judged)
    assert chosen[0] == judged[0].candidate
    assert best.candidate in chosen
    assert len({dict(way.exchanges)["A"].split()[0] for way in chosen}) >= 4  # not one schedule four times


def test_each_back_end_of_a_schedule_is_measured_once():
    chosen = [dict(one.exchanges)["A"] for one in shortlist(rank_ways(ASKED, CONFIGS, predict, MACHINE))]
    movers = {word for how in chosen if how.startswith("all_gather.push") for word in how.split() if "mover=" in word}
    assert len(movers) >= 2


def test_what_was_best_is_varied_along_one_coordinate_after_the_other():
    measured = (way("all_gather.mesh"), way("all_gather.push pieces=4", 128))  # the fastest first
    found = refinements(CONFIGS[0], measured, ASKED)
    assert way("all_gather.mesh", 128) in found  # the best exchange, with constants that were good beside another
    options = [dict(one.exchanges)["A"] for one in found]
    assert all(how.split()[0] == "all_gather.mesh" for how in options)
    changed = {word.split("=")[0] for how in options for word in how.split()[1:]}
    assert changed == {"pieces", "col_pieces", "lanes"}  # one at a time
    assert max(len(how.split()) for how in options) == 2
    assert not set(found) & set(measured)
    assert all(is_in_search_space(one, ASKED, CONFIGS) for one in found)


def test_the_librarys_way_has_a_start():
    library, push = (KernelWay((("A", how),)) for how in ("all_gather.collective", "all_gather.push"))
    for us, taken in ((95.0, library), (85.0, push)):
        assert predicted_best((RankedWay(library, 100.0), RankedWay(push, us))) == taken
    assert predicted_best((RankedWay(library), RankedWay(push))) == library  # no machine is described


def test_where_no_machine_is_described_nothing_is_predicted():
    assert prediction_machine(target_named("a100x8"), 4).name == "a100x8"
    assert prediction_machine(Target("cuda"), 64) is None
    assert prediction_machine(Target("cpu"), 8).gpus == 8
    judged = rank_ways(ASKED, CONFIGS, predict, None)
    assert {each.predicted_us for each in judged} == {None}
    assert len(shortlist(judged)) > 3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    return tmp_path


def way(how: str, block: int = 64) -> KernelWay:
    return KernelWay((("A", how), ("C", ASKED["C"])), (("BLOCK", block),))


def test_a_tuning_is_kept_by_content(cache: Path):
    key = content_key("text", ASKED, 4)
    measured = TunedTimes(
        key, (TimedWay(way("all_gather.push pieces=4", 128), 80.0), TimedWay(way("all_gather.collective"), 99.0))
    )
    save_tuning("kernel", measured)
    assert read_tuning("kernel", key, ASKED, CONFIGS) == measured
    assert read_tuning("kernel", content_key("text", ASKED, 8), ASKED, CONFIGS) is None
    assert tuning_path("kernel", key).is_relative_to(cache)


@pytest.mark.parametrize(
    "stranger",
    [
        way("all_gather.push pieces=64"),
        way("all_gather.pushed"),
        way("all_gather.push", block=96),
        KernelWay((("A", "all_gather.push"),), CONFIGS[0]),
        KernelWay((("A", "all_gather.push"), ("C", "reduce_scatter.ring")), CONFIGS[0]),
    ],
)
def test_a_file_that_names_what_nobody_tried_is_ignored_aloud(cache: Path, stranger: KernelWay):
    assert not is_in_search_space(stranger, ASKED, CONFIGS)
    save_tuning("kernel", TunedTimes("key", (TimedWay(stranger, 1.0),)))
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert read_tuning("kernel", "key", ASKED, CONFIGS) is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"key": "key", "times": []}', b"\xff" * 9, b'{"key": "\xff"}']
)
def test_a_broken_file_is_ignored_aloud(cache: Path, content: bytes):
    path = tuning_path("kernel", "key")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert read_tuning("kernel", "key", ASKED, CONFIGS) is None

"""The order in which an answer is looked for, and that it says where it found it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.records.outside import OUTSIDE, TORCH_FUSED
from overweave.tuner.model.choose import choose, explain_choice
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Knowledge, Table, Time, bucket_problem, fingerprint, path_of, save

GPU, CPU = Target("cuda"), Target("cpu")
PROBLEM = Problem(operator="all_gather_matmul", m=4096, n=3840, k=5120, world_size=4, dtype="bfloat16")
NOTHING = Knowledge(Table(fingerprint=fingerprint(GPU, 4)), None)


def knowing(*times: Time) -> Knowledge:
    return Knowledge(NOTHING.own.with_entries((Entry(bucket_problem(PROBLEM), times),)), None)


@pytest.mark.slow
def test_measurements_come_before_the_model():
    assert choose(PROBLEM, GPU, NOTHING).source == "model"
    choice = choose(PROBLEM, GPU, knowing(Time("pull", {"pieces": 2}, 9.0), Time("sequential", {}, 10.0)))
    assert (choice.source, choice.plan, choice.text) == ("cache", "all_gather_matmul.pull", "pull pieces=2")
    assert choice.options == {"kernel": "hopper", "sms": 132, "pieces": 2}
    assert "9.0 us" in choice.reason
    near = choose(replace(PROBLEM, n=4096), GPU, knowing(Time("pull", {"pieces": 2}, 9.0)))
    assert (near.source, near.text) == ("nearest", "pull pieces=2")
    assert choose(replace(PROBLEM, n=8192), GPU, knowing(Time("pull", {"pieces": 2}, 9.0))).source == "model"


def test_a_winner_that_cannot_compute_this_problem_is_passed_over_aloud():
    known = knowing(Time(TORCH_FUSED, {}, 800.0), Time("push", {"pieces": 1}, 900.0), Time("per_shard", {}, 1000.0))
    assert choose(PROBLEM, GPU, known).plan == TORCH_FUSED
    ragged = choose(replace(PROBLEM, m=4095), GPU, known)
    assert ragged.text == "push pieces=1"
    assert "divide by 4" in dict(ragged.rejected)[TORCH_FUSED]
    odd = choose(replace(PROBLEM, m=4095, n=3841), GPU, known)
    assert odd.text == "per_shard"
    assert choose(replace(PROBLEM, m=4095), GPU, knowing(Time(TORCH_FUSED, {}, 8.0))).source == "model"


def test_what_costs_the_host_more_than_the_gpu_is_not_taken_for_the_gpus_time():
    """Calls of torch's fused operators follow each other no quicker than the host makes them."""
    quick = knowing(Time(TORCH_FUSED, {}, 98.0), Time("push", {"pieces": 1}, 115.0), Time("sequential", {}, 126.0))
    choice = choose(PROBLEM, GPU, quick)
    assert choice.text == "push pieces=1"
    assert "but for torch.fused, 98.0 us, which costs the host more" in choice.reason
    assert choose(PROBLEM, GPU, knowing(Time(TORCH_FUSED, {}, 98.0), Time("sequential", {}, 600.0))).plan == TORCH_FUSED


def test_a_winner_of_more_pieces_than_the_rows_have_is_taken_in_fewer():
    """And not passed over for what was measured far behind it."""
    problem = Problem(operator="matmul_reduce_scatter", m=1536, n=8192, k=2048, world_size=4, dtype="bfloat16")
    times = Time("scatter", {"own_pieces": 4, "pieces": 1}, 149.0), Time(TORCH_FUSED, {}, 196.0)
    known = Knowledge(NOTHING.own.with_entries((Entry(replace(problem, m=2048), times),)), None)
    assert choose(replace(problem, m=2048), GPU, known).text == "scatter own_pieces=4 pieces=1"
    fewer = choose(problem, GPU, known)
    assert (fewer.source, fewer.text) == ("nearest", "scatter own_pieces=2 pieces=1")
    assert "149.0 us, in as many pieces as those rows have" in fewer.reason


def test_a_new_number_of_rows_costs_nothing():
    known = knowing(Time("push", {"pieces": 1}, 9.0))
    assert choose(replace(PROBLEM, m=3500), GPU, known).source == "cache"
    assert choose(replace(PROBLEM, m=3000), GPU, known).source == "nearest"


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("target", [GPU, CPU, replace(GPU, is_hopper=False), replace(GPU, name="NVIDIA Unheard")])
def test_every_choice_can_be_built(operator: str, target: Target):
    for dtype in ("bfloat16", "float32"):
        for changes in ({}, {"m": 0}, {"m": 1}, {"m": 3}, {"n": 33, "k": 9}, {"world_size": 1}, {"m": 1 << 14}):
            problem = replace(PROBLEM, **({"operator": operator, "n": 256, "k": 128, "dtype": dtype} | changes))
            problem = replace(problem, m=problem.record.whole_rows(problem.m, problem.world_size))
            choice = choose(problem, target)
            assert choice.reason
            if choice.plan not in OUTSIDE:
                assert build(choice.plan, problem, choice.options, rank=0).name == choice.plan


def test_a_group_of_one_and_no_rows_take_the_library_path():
    for changes, why in (({"world_size": 1}, "group of one"), ({"m": 0}, "no rows")):
        choice = choose(replace(PROBLEM, **changes), GPU)
        assert choice.plan == "all_gather_matmul.sequential"
        assert why in choice.reason


@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        ("all_gather_matmul", "gather_packed"),
        ("matmul_reduce_scatter", "scatter_packed"),
        ("matmul_all_reduce", "one_shot_packed"),
    ],
)
def test_decoding_takes_packed_messages_cold(operator: str, plan: str):
    assert choose(replace(PROBLEM, operator=operator, m=8, n=512, k=512), GPU, NOTHING).text == plan


def test_on_a_cpu_the_overlapped_schedule_is_emulated_until_somebody_measures():
    assert choose(PROBLEM, CPU, NOTHING).text == "push"
    assert choose(PROBLEM, CPU, knowing(Time("sequential", {}, 1.0))).text == "sequential"


@pytest.mark.slow
def test_explained_weighs_every_candidate(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    own = fingerprint(GPU, 4)
    save((Entry(bucket_problem(PROBLEM), (Time("pull", {"pieces": 2}, 95.5), Time("sequential", {}, 100.5))),), own)
    text = str(explain_choice(PROBLEM, GPU))
    assert path_of(own).exists()
    assert "-> pull pieces=2" in text
    assert "measured 95.5 us" in text
    assert "measured 100.5 us" in text
    assert text.count("predicted") > 5
    assert "torch.fused" in text
    ragged = str(explain_choice(replace(PROBLEM, n=3841), GPU))
    kept_back = "push", "gather_packed", "pull", "ring", "double_ring", "islands", "synth"
    assert ragged.count("multiples of 8") == len(kept_back)  # once for each
    assert "on the nearest known problem" in ragged

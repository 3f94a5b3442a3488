"""The candidates: all in the catalog, all buildable where nothing stands in their way, and no others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.cards import MachineMatch
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS, methods_for
from overweave.schedules.records.outside import OUTSIDE, TORCH_FUSED, TORCH_ONE_SHOT, TORCH_TWO_SHOT
from overweave.tuner.model.choose import choose
from overweave.tuner.space.space import (
    Candidate,
    candidate,
    candidates,
    full_options,
    is_member,
    reason_unsupported,
    variations,
)
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Time, shipped

GPU, CPU = Target("cuda"), Target("cpu")
IN_PAIRS = replace(GPU, found=MachineMatch("h100_pciex8", "described"))  # some GPUs are joined by slower links


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_portable_kernel_was_never_clearly_the_quickest_nor_best_in_another_than_its_first_shape(ranks: int):
    """Why no more of its shapes are tried beside the Hopper kernel's."""
    table = shipped("NVIDIA H200", ranks)
    assert table is not None
    for entry in table.entries:
        of_kernel: dict[object, list[Time]] = {"hopper": [], "portable": []}
        for time in entry.times:
            if "block_m" in time.options:
                of_kernel[time.options["kernel"]].append(time)
        if of_kernel["portable"] and of_kernel["hopper"]:
            best = min(of_kernel["portable"], key=lambda time: time.us)
            assert best.us > 0.98 * min(time.us for time in of_kernel["hopper"])
            assert (best.options["block_m"], best.options["block_n"]) == (128, 256)


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_peer_access_only_plans_whose_rows_the_library_moves_can_run(operator: str):
    apart, problem = replace(GPU, peer_access=False), problem_of(operator)
    refused = "the GPUs do not reach each other's memory"
    left = [what for what in candidates(operator) if not reason_unsupported(problem, apart, what, "device")]
    for what in left:
        assert not METHODS[what.schedule(operator)].addresses_peers(dict(what.options))
    assert any(what.is_plain(operator) for what in left)
    lost = {what for what in candidates(operator) if not reason_unsupported(problem, GPU, what, "device")} - {*left}
    assert lost
    assert all(reason_unsupported(problem, apart, what, "device").startswith(refused) for what in lost)
    taken = choose(problem, apart)
    assert not METHODS[taken.plan].addresses_peers(taken.options)


@pytest.mark.parametrize("operator", OPERATORS)
def test_two_levels_are_candidates_where_there_are_several_islands(operator: str):
    parted = replace(GPU, peer_access=False, parted="ranks 0-1 on a and ranks 2-3 on b")
    problem = problem_of(operator, islands=((0, 1), (2, 3)))
    left = [what for what in candidates(operator) if not reason_unsupported(problem, parted, what)]
    assert not any(METHODS[what.schedule(operator)].crosses_islands(dict(what.options)) for what in left)
    levels = [what for what in left if METHODS[what.schedule(operator)].has_levels]
    assert levels
    for what in levels:
        assert "one island" in reason_unsupported(problem_of(operator), IN_PAIRS, what)
        without = replace(parted, island_access=False)
        assert reason_unsupported(problem, without, what).startswith("the GPUs of an island do not reach")


def test_messages_to_owners_are_taken_with_a_norm_behind_them():
    normed = replace(problem_of("matmul_reduce_scatter", m=16), norm=Norm(eps=1e-5))
    (packed,) = (what for what in candidates("matmul_reduce_scatter") if what == candidate("scatter_packed", {}))
    assert not reason_unsupported(normed, GPU, packed)
    assert "packed" in choose(normed, GPU).plan


def problem_of(operator: str, **changes: object) -> Problem:
    made = Problem(operator=operator, m=2048, n=512, k=256, world_size=4, dtype="bfloat16")
    return replace(made, **changes)


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_library_path_stands_first_and_nothing_twice(operator: str):
    space = candidates(operator)
    assert space[0] == Candidate("sequential")
    assert len(set(space)) == len(space)
    assert {what.plan for what in space if what.is_by_torch} == OUTSIDE.keys() & {*OPERATORS[operator].baselines}
    known = OUTSIDE.keys() | {method.name for method in methods_for(operator)}
    assert {*OPERATORS[operator].baselines} <= known


@pytest.mark.slow
@pytest.mark.parametrize("target", [GPU, CPU, replace(GPU, is_hopper=False)])
def test_what_nothing_stands_against_can_be_built(operator: str, target: Target):
    problem = problem_of(operator)
    built = 0
    for what in candidates(operator):
        if not what.is_by_torch and not reason_unsupported(problem, target, what):
            options = full_options(problem, target, what)
            assert build(what.schedule(operator), problem, options, rank=0).name == what.schedule(operator)
            built += 1
    assert built >= 4


def test_the_library_path_stands_against_everything(operator: str):
    for changes in ({"m": 0}, {"world_size": 1}, {"n": 3}, {"dtype": "float32"}, {"m": 7}):
        assert reason_unsupported(problem_of(operator, **changes), GPU, Candidate("sequential")) == ""


@pytest.mark.parametrize(
    ("changes", "what", "why"),
    [
        ({"m": 0}, candidate("push", {}), "no rows"),
        ({"world_size": 1}, candidate("push", {}), "group of one"),
        ({"n": 513}, candidate("push", {}), "multiples of 8"),
        ({"dtype": "float32"}, candidate("push", {}), "tensor cores"),
        ({"m": 512}, candidate("push", {"pieces": 2}), "pieces=2"),
        ({"m": 2046}, Candidate(TORCH_FUSED), "divide by 4"),
        ({"epilogue": Epilogue(activation="silu")}, Candidate(TORCH_FUSED), "do no silu"),
        ({"epilogue": Epilogue(activation="silu", gate=True)}, Candidate(TORCH_FUSED), "do no silu+gate"),
        ({"n": 512, "columns": (128,) * 4}, candidate("push", {}), "takes 3"),
        ({"n": 513, "columns": (500, 13)}, candidate("push", {}), "n=500+13"),
    ],
)
def test_what_cannot_be_says_why(changes: dict[str, object], what: Candidate, why: str):
    assert why in reason_unsupported(problem_of("all_gather_matmul", **changes), GPU, what)
    assert reason_unsupported(problem_of("all_gather_matmul"), GPU, what) == ""


@pytest.mark.parametrize(
    ("changes", "why"), [({"dtype": "float16"}, "bf16 or fp32"), ({"n": 513}, "multiple of 8"), ({"m": 0}, "no rows")]
)
@pytest.mark.parametrize("plan", [TORCH_ONE_SHOT, TORCH_TWO_SHOT])
def test_what_torchs_all_reduces_cannot_sum(plan: str, changes: dict[str, object], why: str):
    assert why in reason_unsupported(problem_of("matmul_all_reduce", **changes), GPU, Candidate(plan))
    assert reason_unsupported(problem_of("matmul_all_reduce", m=3), GPU, Candidate(plan)) == ""
    assert "is no all_gather_matmul" in reason_unsupported(problem_of("all_gather_matmul"), GPU, Candidate(plan))


def test_torch_needs_cuda_and_the_hopper_kernel_a_hopper():
    assert "CUDA" in reason_unsupported(problem_of("all_gather_matmul"), CPU, Candidate(TORCH_FUSED))
    pinned = candidate("push", {"kernel": "hopper"})
    for target in (CPU, replace(GPU, is_hopper=False)):
        assert "sm_90" in reason_unsupported(problem_of("all_gather_matmul"), target, pinned)


def test_what_a_kernel_pushes_is_tried_in_bulk_too():
    problem = problem_of("all_gather_matmul")
    base = candidate("push", {"pieces": 1, "mover": "copy_kernel", "copy_programs": 8})
    (in_bulk,) = (what for what in variations(base, problem, GPU) if dict(what.options)["mover"] == "bulk_kernel")
    assert dict(in_bulk.options) == dict(base.options) | {"mover": "bulk_kernel"}
    assert is_member(problem.operator, in_bulk)
    assert not is_member(problem.operator, candidate("push", {"pieces": 1, "mover": "bulk_kernel", "copy_programs": 9}))
    whole = [what for what in candidates(problem.operator) if dict(what.options).get("mover") == "bulk_kernel"]
    for what in (in_bulk, *whole):
        assert reason_unsupported(problem, GPU, what) == ""
        assert "sm_90" in reason_unsupported(problem, replace(GPU, is_hopper=False), what)
        build(what.schedule(problem.operator), problem, full_options(problem, GPU, what), rank=0)
    assert not whole


def test_half_tiles_are_a_choice_of_their_own_and_no_other_shape_of_them_is_tried():
    halves = [what for what in candidates("all_gather_matmul") if "half_tiles" in dict(what.options)]
    assert {dict(what.options)["pieces"] for what in halves} == {1, 2}
    for what in halves:
        assert is_member("all_gather_matmul", what)
        assert variations(what, problem_of("all_gather_matmul"), GPU) == ()


def test_variations_pin_every_tile_shape_and_can_be_built():
    problem = problem_of("all_gather_matmul")
    base = candidate("push", {"pieces": 2})
    varied = variations(base, problem, GPU)
    assert {dict(what.options)["kernel"] for what in varied} == {"hopper", "portable"}
    assert len(set(varied)) == len(varied) >= 4
    for what in varied:
        assert dict(what.options)["pieces"] == 2
        assert is_member(problem.operator, what)
        plan = build(what.schedule(problem.operator), problem, full_options(problem, GPU, what), rank=0)
        assert plan.realization.matmul.block_m == dict(what.options)["block_m"]
    assert variations(Candidate("per_shard"), problem, GPU) == ()
    assert variations(base, problem, CPU) == ()


def test_only_members_are_members(operator: str):
    assert all(is_member(operator, what) for what in candidates(operator))
    strangers = [
        Candidate("teleport"),
        candidate("sequential", {"sms": 1}),
        candidate("push", {"pieces": 63}),
        candidate("push", {"pieces": 1, "block_m": 256, "block_n": 256, "stages": 8}),
        candidate("push", {"pieces": 1, "kernel": "hopper"}),
        candidate(TORCH_FUSED, {"pieces": 1}),
    ]
    assert not [what for what in strangers if is_member(operator, what)]
    assert not is_member("matmul", Candidate("sequential"))


def test_a_candidate_reads_as_the_operators_take_it():
    assert str(candidate("push", {"pieces": 2, "order": "ring"})) == "push order=ring pieces=2"
    with pytest.raises(InputError, match="all_gather_matmul"):
        candidates("all_to_all")


def test_a_gate_has_tile_shapes_of_its_own_that_can_be_pinned():
    swiglu = Epilogue(activation="silu", gate=True)
    scaled = {"epilogue": replace(swiglu, scaling="rows"), "dtype": "float8_e4m3fn", "b_is_transposed": True}
    for special in ({"epilogue": swiglu}, scaled | {"out_dtype": "bfloat16"}):
        problem = problem_of("all_gather_matmul", **special)
        varied = variations(candidate("push", {"pieces": 2}), problem, GPU)
        assert {dict(what.options)["kernel"] for what in varied} == {"hopper", "portable"}
        assert all(is_member(problem.operator, what) for what in varied)
        for what in varied:
            build(what.schedule(problem.operator), problem, full_options(problem, GPU, what), rank=0)


def test_what_may_differ_between_calls_is_never_taken_unasked():
    """Neither the search nor a file names a plan whose sums have no order; a caller may, as `plan=remote_add`."""
    problem = problem_of("matmul_reduce_scatter", m=256, n=64)
    loose = Candidate("remote_add")
    assert any(goal.unordered for goal in build(loose.schedule(problem.operator), problem, {}).schedule.goal)
    assert loose.plan not in {what.plan for what in candidates(problem.operator)}
    assert not is_member(problem.operator, loose)
    for what in candidates(problem.operator):
        if not what.is_by_torch:
            schedule = build(what.schedule(problem.operator), problem, dict(what.options)).schedule
            assert not any(goal.unordered for goal in schedule.goal)


def test_of_two_ranks_a_reduce_scatter_that_is_another_is_left_out():
    two, four = (problem_of("matmul_reduce_scatter", world_size=size) for size in (2, 4))
    for plan, other in (("scatter_stored", "ring_stored"), ("fused_ring", "scatter sums=epilogue")):
        assert reason_unsupported(two, GPU, Candidate(plan)) == f"of two ranks it is {other}"
        assert reason_unsupported(four, GPU, Candidate(plan)) == ""
    assert reason_unsupported(two, GPU, Candidate("ring_stored")) == ""

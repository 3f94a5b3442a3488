"""Every kind of plan bound as on a GPU, without one: kernels compile with the very arguments that a launch passes them.

A call is then made, with a driver that only writes down what it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from overweave.ir.counts import COUNTS
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.operators.forms import Z
from overweave.ir.plan import LIBRARY, W_REST, X_REST, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import INPUT, OUTPUT, Compute
from overweave.memory.layout import lay_out
from overweave.runtime.gpu import bound
from overweave.runtime.gpu.bound import PackedPlan
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.runtime.kernel_calls.call import Peers
from overweave.runtime.library.two_parts import takes_parts
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.shape import (
    FLOAT8_HOPPER,
    FLOAT8_PORTABLE,
    GATED,
    GATED_FLOAT8,
    HOPPER,
    KernelChoice,
    TileShape,
)
from tests.runtime.without_gpu import CALLER, HostHeap, Launched, check_waits, drain, launched, waited, workspace

__all__ = ["launched", "waited"]  # fixtures

KERNELS: tuple[KernelChoice, ...] = ("hopper", "portable")
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Case(NamedTuple):
    """A plan, what is special about its problem, which rank binds it, and of how many."""

    operator: str
    plan: str
    special: Mapping[str, Any] = MappingProxyType({})
    rank: int = 0
    world_size: int = 2

    def __str__(self) -> str:
        special = (f"{name}={value}" for name, value in self.special.items())
        return " ".join((self.operator, self.plan, *special, f"rank={self.rank} of {self.world_size}"))

    def build(self) -> Plan:
        name, *pairs = self.plan.split()
        options = dict(pair.split("=") for pair in pairs)
        size = {"m": 512, "n": 768, "k": 256, "dtype": "bfloat16"} | dict(self.special)
        problem = Problem(operator=self.operator, world_size=self.world_size, **size)
        return build(f"{self.operator}.{name}", problem, options, rank=self.rank)


FP8 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "b_is_transposed": True}
SPECIAL: tuple[dict[str, Any], ...] = (
    {},
    {"b_is_transposed": True, "epilogue": Epilogue(bias=True, activation="silu", residual=True)},
    {"epilogue": Epilogue(activation="silu", gate=True)},
    {"columns": (512, 128, 128)},
    FP8 | {"epilogue": Epilogue(scaling="rows")},
    FP8 | {"epilogue": Epilogue(scaling="tensor")},
)
SWIGLU = Epilogue(activation="silu", gate=True)
SCALED_SWIGLU = Epilogue(scaling="rows", activation="silu", gate=True)
SHAPE_OPTIONS = ("block_m", "block_n", "block_k", "stages", "warps", "split_n", "kernel")
NORMED = (
    "two_shot kernel=hopper pieces=2",
    "two_shot kernel=portable",
    "two_shot kernel=hopper sums=epilogue",
)
PACKED = ("one_shot_packed", "two_shot_packed")
LIBRARY_PLANS = ("per_shard",)


def pinned(shape: TileShape) -> str:
    """A tile shape as options of a plan."""
    return " ".join(f"{name}={getattr(shape.config, name)}" for name in SHAPE_OPTIONS)


def gated_cases() -> Iterator[Case]:
    """Both kernels in each of their tile shapes."""
    for kernel in KERNELS:
        for shape, turned in product(GATED[kernel], (False, True)):
            yield Case(GATHER, f"push {pinned(shape)}", {"epilogue": SWIGLU, "b_is_transposed": turned})
        for shape in GATED_FLOAT8[kernel]:
            yield Case(GATHER, f"push {pinned(shape)}", FP8 | {"epilogue": SCALED_SWIGLU, "m": 500})
        geglu = Epilogue(scaling="tensor", activation="gelu", residual=True, gate=True)
        yield Case(GATHER, f"pull kernel={kernel}", FP8 | {"epilogue": geglu}, rank=1)
    for plan in LIBRARY_PLANS:
        yield Case(GATHER, plan, FP8 | {"epilogue": SCALED_SWIGLU})


def norm_cases() -> Iterator[Case]:
    """With and without a residual; rows in one part and in several; a rank without rows of its own to sum."""
    for plan in NORMED:
        yield Case(REDUCE, plan, {"norm": Norm(eps=1e-5, residual=True)})
        yield Case(REDUCE, plan, {"norm": Norm(eps=1e-5), "n": 8200, "m": 5}, rank=1)
        yield Case(REDUCE, plan, {"norm": Norm(eps=1e-5, residual=True), "m": 1}, rank=1)


def fp8_cases() -> Iterator[Case]:
    """The library's products, where scales travel, and the tile shapes of the kernels."""
    for plan, scaling in product(LIBRARY_PLANS, (Epilogue(scaling="rows"), Epilogue(scaling="tensor"))):
        yield Case(GATHER, plan, FP8 | {"epilogue": scaling})
    by_rows = FP8 | {"epilogue": Epilogue(scaling="rows", bias=True, residual=True)}
    for shape in (*FLOAT8_HOPPER, *FLOAT8_PORTABLE):
        yield Case(GATHER, f"push {pinned(shape)}", by_rows | {"m": 500})
    for plan in ("push kernel=hopper", "push kernel=portable", "per_shard"):
        scaled = Epilogue(scaling="rows", bias=True)
        yield Case(GATHER, plan, FP8 | {"epilogue": scaled, "columns": (512, 128, 128)})
        yield Case(GATHER, plan, {"epilogue": Epilogue(bias=True, activation="gelu"), "columns": (512, 256)})


SUMMED = (
    (SCATTER, "per_shard"),
    (SCATTER, "scatter kernel=hopper pieces=2"),
    (SCATTER, "scatter kernel=portable sums=epilogue"),
    (SCATTER, "scatter kernel=hopper mover=copy_kernel"),
    (SCATTER, "fused_ring kernel=hopper"),
    (SCATTER, "scatter_pull kernel=hopper"),
    (REDUCE, "two_shot kernel=hopper"),
    (REDUCE, "two_shot kernel=portable sums=epilogue"),
)


def fp8_sum_cases() -> Iterator[Case]:
    """Products that are scaled before they are summed over ranks; the tile shapes of tiles that add what arrived."""
    for (operator, plan), scaling in product(SUMMED, ("rows", "tensor")):
        yield Case(operator, plan, FP8 | {"epilogue": Epilogue(scaling=scaling)})  # type: ignore[arg-type]
    by_rows = FP8 | {"epilogue": Epilogue(scaling="rows"), "m": 500}
    for shape in (*FLOAT8_HOPPER, *FLOAT8_PORTABLE):
        yield Case(SCATTER, f"scatter sums=epilogue {pinned(shape)}", by_rows)
    yield Case(REDUCE, "two_shot kernel=hopper", by_rows | {"norm": Norm(eps=1e-5, residual=True)})
    yield Case(SCATTER, "scatter kernel=hopper", by_rows | {"m": 1}, rank=1)


ENDING = Epilogue(bias=True, activation="silu", residual=True)
FINISHED = (
    (SCATTER, "scatter kernel=hopper pieces=2"),
    (SCATTER, "remote_add kernel=portable sms=1"),
    (SCATTER, "scatter_pull kernel=portable pieces=2"),
    (REDUCE, "two_shot kernel=hopper sums=epilogue"),
)


def finished_cases() -> Iterator[Case]:
    """Sums that kernels finish; by tiles of fp8 too, in a ring of three, and on a rank that has none."""
    yield from (Case(operator, plan, {"epilogue": ENDING}) for operator, plan in FINISHED)
    yield Case(SCATTER, "fused_ring kernel=hopper", {"epilogue": ENDING}, world_size=3)
    yield Case(SCATTER, "scatter kernel=portable sums=epilogue", {"epilogue": ENDING}, world_size=4)
    scaled = FP8 | {"epilogue": Epilogue(scaling="rows", bias=True, residual=True)}
    yield Case(SCATTER, "scatter kernel=hopper sums=epilogue", scaled, world_size=3)
    yield Case(SCATTER, "scatter kernel=hopper sums=epilogue", {"epilogue": ENDING, "m": 1}, rank=1)
    yield Case(REDUCE, "two_shot kernel=hopper", {"epilogue": ENDING, "m": 1}, rank=1)


STORED = ((SCATTER, "scatter_stored"), (SCATTER, "ring_stored"), (REDUCE, "ring_stored"))


def stored_cases() -> Iterator[Case]:
    """Tiles that store at peers, by both kernels; a rank that has no rows to sum; what may come with them, by turns."""
    for operator, plan in STORED:
        yield Case(operator, f"{plan} kernel=hopper", world_size=4)
        yield Case(operator, f"{plan} kernel=hopper", {"m": 1}, rank=1, world_size=3)
        yield Case(operator, f"{plan} kernel=hopper", {"epilogue": ENDING, "m": 500}, world_size=4)
    scaled = FP8 | {"epilogue": Epilogue(scaling="rows", bias=True, residual=True)}
    for plan in ("ring_stored",):
        yield Case(REDUCE, f"{plan} kernel=portable", world_size=3)
        yield Case(REDUCE, f"{plan} kernel=hopper", world_size=8)
        yield Case(REDUCE, f"{plan} kernel=hopper", {"m": 1}, world_size=3)
        yield Case(REDUCE, f"{plan} {pinned(HOPPER[2])}", world_size=4)
    yield Case(SCATTER, "ring_stored kernel=hopper", scaled, world_size=4)
    yield Case(REDUCE, "ring_stored kernel=hopper", {"norm": Norm(eps=1e-5, residual=True)}, world_size=4)


def packed_cases() -> Iterator[Case]:
    for special in ({}, {"m": 1, "n": 8}, {"dtype": "float16", "m": 4000, "n": 1000}, {"dtype": "float32"}):
        yield from (Case(REDUCE, plan, special) for plan in PACKED)
    yield from (Case(REDUCE, plan, {"m": 3}, rank=1) for plan in PACKED)
    yield from (Case(REDUCE, plan, FP8 | {"epilogue": Epilogue(scaling="rows")}) for plan in PACKED)
    yield from (Case(REDUCE, plan, {"epilogue": ENDING}) for plan in PACKED)
    yield Case(SCATTER, "scatter_packed", FP8 | {"epilogue": Epilogue(scaling="rows", bias=True)})
    yield Case(SCATTER, "scatter_packed", {"epilogue": ENDING, "m": 1, "n": 8, "dtype": "float32"}, rank=1)


def cases_of_one_row() -> Iterator[Case]:
    """The second rank has none."""
    for rank in (0, 1):
        for plan, special in product(("push kernel=hopper", "pull kernel=hopper"), SPECIAL):
            yield Case(GATHER, plan, {**special, "m": 1}, rank)
        yield Case(SCATTER, "scatter kernel=hopper", {"m": 1}, rank)
        yield Case(SCATTER, "scatter sums=epilogue kernel=hopper", {"m": 1}, rank)
        yield Case(SCATTER, "fused_ring kernel=hopper", {"m": 1}, rank)
        yield from (Case(SCATTER, f"remote_add kernel=hopper sms={sms}", {"m": 1}, rank) for sms in (1, 132))
        yield Case(REDUCE, "two_shot kernel=hopper", {"m": 1}, rank)


CASES = (
    *(Case(GATHER, f"push kernel={kernel}", special) for kernel in ("hopper", "portable") for special in SPECIAL),
    Case(GATHER, "pull kernel=hopper pieces=2"),
    Case(GATHER, "push mover=copy_kernel kernel=portable"),
    Case(SCATTER, "scatter kernel=hopper"),
    Case(SCATTER, "scatter kernel=hopper block_m=128 block_n=160 stages=5", {"m": 1}, rank=1),
    Case(SCATTER, "scatter sums=epilogue kernel=hopper"),
    *(Case(SCATTER, f"fused_ring kernel={kernel}", world_size=ranks) for kernel in KERNELS for ranks in (2, 3)),
    *(Case(SCATTER, "remote_add kernel=hopper sms=1", {"dtype": dtype}) for dtype in ("bfloat16", "float16")),
    Case(SCATTER, "remote_add kernel=portable", {"dtype": "float32"}, world_size=3),
    Case(REDUCE, "two_shot kernel=hopper", {"norm": Norm(eps=1e-5, residual=True)}),
    *gated_cases(),
    *norm_cases(),
    *fp8_cases(),
    *fp8_sum_cases(),
    *cases_of_one_row(),
    *finished_cases(),
    *stored_cases(),
)


def words_of(case: Case) -> set[str]:
    """What a case has: each option, with the tile shape as one, each thing that is special, its rank and its ranks."""
    method, *options = case.plan.split()
    shape = [option for option in options if option.partition("=")[0] in SHAPE_OPTIONS[:-1]]
    special = {f"{name}={value}" for name, value in case.special.items() if name != "epilogue"}
    after = {word for word in str(case.special.get("epilogue", "")).split("+") if word}
    beside = {"a later rank"} if case.rank else set[str]()
    return {f"{case.operator} {method}", " ".join(shape), f"of {case.world_size}", *special, *after, *beside} | {
        option for option in options if option not in shape
    }


def parametrized(cases: Iterable[Case]) -> Any:
    """The cases of a test. One that shows nothing which no case before has shown is nightly."""
    known, marked = set[str](), []
    for case in cases:
        words = words_of(case)
        marked.append(pytest.param(case, marks=() if words - known else pytest.mark.nightly))
        known |= words
    return pytest.mark.parametrize("case", marked, ids=str)


def tensors_of(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """The caller's, as the operators pass them."""
    problem = plan.problem
    buffers = [buffer for buffer in plan.schedule.buffers if buffer.home in (INPUT, OUTPUT)]
    shapes = {buffer.name: (buffer.rows, buffer.cols, buffer.dtype or problem.dtype) for buffer in buffers}
    sides = (*problem.epilogue.inputs, *((*problem.norm.inputs, Z) if problem.norm else ()))
    sides += (COUNTS,) if problem.counted else ()
    shapes |= {name: problem.operand(name, rank) for name in sides}
    made = {
        name: torch.zeros((rows, cols), dtype=getattr(torch, dtype)) for name, (rows, cols, dtype) in shapes.items()
    }
    if problem.counted:  # 0, 1, 2, ... row by row
        made[COUNTS] = torch.arange(problem.world_size**2).reshape(problem.world_size, -1)
    turned = [name for name in made if problem.b_is_transposed and name.split(".")[0] in ("w", "gate")]
    return made | {name: made[name].t().contiguous().t() for name in turned}


def stored_by_kernels(plan: Plan, rank: int) -> set[str]:
    """The caller's tensors that kernels of a rank store in."""
    kernels = {one.queue for one in plan.realization.engines if one.engine in ("tile_kernel", "reduce_kernel")}
    writes = [part for each in plan.schedule.of_rank(rank) if each.queue in kernels for part in each.writes]
    stored = {part.buffer for part in writes if not part.is_empty and plan.schedule.buffer(part.buffer).home == OUTPUT}
    return stored | ({Z} if plan.problem.norm and stored else set())


@pytest.mark.slow
@parametrized(CASES)
def test_kernels_compile_with_the_arguments_of_a_launch(
    case: Case, launched: list[Launched], waited: list[tuple[int, int]]
) -> None:
    plan = case.build()
    tensors = tensors_of(plan, case.rank)
    space = workspace(case.rank, case.world_size)
    call = bound.BoundPlan(plan, space, tensors)
    assert all(copies._drain is drain for _, copies in call._queues)  # before a graph is made
    others = tensors_of(plan, case.rank)
    addresses = {name: tensor.data_ptr() for name, tensor in others.items()}
    call.launch_prologue(CALLER.cuda_stream)
    for enqueue in call.enqueue:
        enqueue(CALLER, others, addresses)
    found = set[Any]().union(*(each.addresses for each in launched))
    assert not found & {tensor.data_ptr() for tensor in tensors.values() if tensor.numel()}, "they have moved"
    assert {addresses[name] for name in stored_by_kernels(plan, case.rank)} <= found
    by_library = (
        each for each in plan.schedule.of_rank(case.rank) if plan.realization.engine_of(each.queue) == LIBRARY
    )
    check_waits(plan, space, launched, waited)
    assert sum("tell" in each for each in launched) == sum(bool(each.notifies) for each in by_library)
    if plan.problem.sum_epilogue.steps and any(
        getattr(each, "finishes", False) for each in plan.schedule.of_rank(case.rank)
    ):
        assert {addresses[name] for name in plan.problem.sum_epilogue.inputs} <= found
    kinds = {"tile_kernel": "matmul", "reduce_kernel": "reduction", "copy_kernel": "copy"}
    for assignment in plan.realization.engines:
        kind = kinds.get(assignment.engine)
        if kind and plan.tile_order(case.rank, assignment.queue).rows:
            assert any(kind in each for each in launched), launched


IN_PARTS = (
    Case(SCATTER, "scatter kernel=hopper"),
    Case(SCATTER, "ring_stored kernel=hopper", {"b_is_transposed": True, "epilogue": ENDING}),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_PARTS, ids=str)
def test_the_hopper_kernel_finds_both_parts_of_its_factors(case: Case, launched: list[Launched]) -> None:
    plan = case.build()
    tensors, others = (in_parts(tensors_of(plan, case.rank)) for _ in range(2))
    assert takes_parts(plan)
    call = bound.BoundPlan(plan, workspace(case.rank, case.world_size), tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in others.items()}
    for enqueue in call.enqueue:
        enqueue(CALLER, others, addresses)
    assert {addresses[name] for name in ("x", "w", X_REST, W_REST)} <= launched[0].addresses


def in_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with x and w in two parts, each as w lies in memory."""
    (x, x_rest), (w, w_rest) = (t.tensor_split([128], dim) for t, dim in ((tensors["x"], 1), (tensors["w"], 0)))
    if not tensors["w"].is_contiguous():
        w, w_rest = (each.t().contiguous().t() for each in (w, w_rest))
    return tensors | {"x": x.contiguous(), X_REST: x_rest.contiguous(), "w": w, W_REST: w_rest}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in stored_cases() if "ring_stored kernel=hopper" in case.plan], ids=str)
def test_rings_know_where_sums_of_peers_lie_and_how_fast_to_store_there(case: Case, launched: list[Launched]) -> None:
    plan = case.build()
    layout = lay_out(plan.schedule, plan.realization.dtype)
    space, heap = workspace(case.rank, case.world_size), HostHeap(layout.size_bytes, case.world_size, case.rank)
    space.lease = lambda layout: heap
    tensors, made = tensors_of(plan, case.rank), list[Peers]()

    def noted(*parts: Any) -> Peers:
        made.append(Peers(*parts))
        return made[-1]

    with (
        mock.patch("overweave.runtime.kernel_calls.bind.Peers", side_effect=noted),
        mock.patch("overweave.runtime.kernel_calls.bind.peer_store_interval_ns", return_value=77) as interval_ns,
    ):
        bound.BoundPlan(plan, space, tensors)
    computes = [each for each in plan.schedule.of_rank(case.rank) if isinstance(each, Compute)]
    spread = {copy.buffer for each in computes for copy in each.copies}
    sums = [heap.addresses[case.rank] + layout.buffers[buffer] for buffer in spread] or [0]
    assert [peers.table[-1].tolist() for peers in made] == [[*sums, 77]]
    config = plan.realization.matmul
    assert config is not None
    strip = 16 * min(64, config.block_n // config.split_n if config.block_m >= 128 else config.block_n // 2)
    assert interval_ns.call_args.args[3] == strip * tensors["y"].itemsize
    assert len(made[0].table) == case.world_size + 1


@pytest.mark.slow
@pytest.mark.parametrize("case", list(packed_cases()), ids=str)
def test_packed_kernels_compile_with_the_arguments_of_a_launch(
    case: Case, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", object)
    plan = case.build()
    own, others = workspace(case.rank), tensors_of(plan, case.rank)
    PlanRun(own, PackedPlan(plan, own, tensors_of(plan, case.rank)), (), True)(others)
    assert ["packed" in each for each in launched] == [True]
    read = plan.problem.sum_epilogue.inputs if others["y"].numel() else ()
    assert {others[name].data_ptr() for name in ("y", *read)} <= launched[0].addresses

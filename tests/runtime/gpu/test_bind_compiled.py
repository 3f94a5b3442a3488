"""Compiled kernels and kernels fused by hand, bound as on a GPU, without one: the arguments of a call compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime.jit import JITFunction, KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

import overweave as ow
from examples.tile_kernels.all_gather_experts import AllGatherExperts
from examples.tile_kernels.gathered_attention import GatheredAttention
from examples.tile_kernels.matmul_ring_reduce_scatter import MatmulReduceScatter
from overweave.compiler.emit.emit import emit, load_generated, shape_parameters
from overweave.compiler.emit.fuse import fusion_options
from overweave.errors import ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Wait
from overweave.memory.cuda import driver
from overweave.memory.device.copy import BETWEEN_SHARED_BYTES
from overweave.ops.author.compile import compile
from overweave.ops.author.tile_program import TileCall
from overweave.runtime.authored import AuthoredKernel, buffers_of_tensors, exchanged_tensors
from overweave.runtime.gpu import handwritten as handwritten_gpu
from overweave.runtime.gpu import launcher
from overweave.runtime.gpu.authored import FusedTiles, _check_shared, _with_stand_in, addresses_of
from overweave.runtime.gpu.bound import BoundPlan
from overweave.runtime.handwritten import Declared
from overweave.runtime.kernel_calls.call import stand_in_for
from tests.runtime.without_gpu import (
    CALLER,
    SHARED_BYTES,
    SIDE_STREAM,
    HostHeap,
    check_waits,
    drain,
    launched,
    waited,
    workspace,
)
from tests.source_tree import ROOT

__all__ = ["launched", "waited"]  # fixtures

pytestmark = pytest.mark.slow

KERNELS = ROOT / "examples" / "kernels"
M, N, K = 512, 256, 128
BLOCKS = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}
STRIDES = {"stride_am": K, "stride_ak": 1, "stride_bk": N, "stride_bn": 1, "stride_cm": N, "stride_cn": 1}
LAUNCH = {"num_warps": 8, "num_stages": 3}
DTYPE = torch.bfloat16


class Case(NamedTuple):
    """A kernel of the examples and how its tensors are exchanged."""

    file: str
    exchanges: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join((self.file, *(f"{tensor}={how}" for tensor, how in self.exchanges.items())))


def shard(exchanges: Mapping[str, str], tensor: str, rows: int) -> int:
    """Rows of a matmul's operand or result that a rank of two passes."""
    how = exchanges.get(tensor, "")
    return rows // 2 if how.startswith(("all_gather", "reduce_scatter")) else rows


def matmul(exchanges: Mapping[str, str]) -> dict[str, Any]:
    a = torch.zeros(shard(exchanges, "A", M), K, dtype=DTYPE)
    b, c = torch.zeros(shard(exchanges, "B", K), N, dtype=DTYPE), torch.zeros(shard(exchanges, "C", M), N, dtype=DTYPE)
    return {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": M, "N": N, "K": K, **STRIDES, **BLOCKS}


def persistent(exchanges: Mapping[str, str]) -> dict[str, Any]:
    a, b = torch.zeros(shard(exchanges, "A", M), K, dtype=DTYPE), torch.zeros(N, K, dtype=DTYPE)
    c = torch.zeros(shard(exchanges, "C", M), N, dtype=DTYPE)
    described = {
        name: TensorDescriptor.from_tensor(tensor, block)
        for name, tensor, block in (("a_desc", a, [128, 64]), ("b_desc", b, [128, 64]), ("c_desc", c, [128, 128]))
    }
    return {**described, "M": M, "N": N, "K": K, **BLOCKS, "NUM_SMS": 132}


GIVEN: dict[str, tuple[str, Callable[[Mapping[str, str]], dict[str, Any]]]] = {
    "matmul": ("matmul_kernel", matmul),
    "persistent": ("persistent_kernel", persistent),
}
MOVERS = ("copy_engine", "copy_kernel", "bulk_kernel", "tiles", "bulk_tiles")
CASES = (
    *(Case(file, {"A": f"all_gather.push mover={mover}"}) for file in GIVEN for mover in MOVERS),
    *(Case("matmul", {"A": how}) for how in ("all_gather.islands", "all_gather.mesh col_pieces=2 lanes=2")),
    Case("matmul", {"A": "all_gather.push mover=tiles", "B": "all_gather.push"}),
    *(Case(file, {"C": "reduce_scatter.scatter"}) for file in GIVEN),
    Case("matmul", {"A": "all_gather.push mover=bulk_tiles", "C": "reduce_scatter.scatter mover=tiles pieces=2"}),
    Case("matmul", {"C": "all_reduce.two_shot mover=tiles"}),
    *(Case("matmul", {"C": f"reduce_scatter.{how}"}) for how in ("mesh col_pieces=2", "double_ring", "islands")),
    *(Case("persistent", {"C": f"all_reduce.{how}"}) for how in ("mesh", "ring lanes=2")),
    *(
        Case(file, {"C": f"{how} mover=bulk_kernel"})
        for file, how in (
            ("matmul", "reduce_scatter.scatter"),
            ("persistent", "all_reduce.two_shot"),
            ("matmul", "all_to_all.send"),
        )
    ),
    Case("matmul", {"A": "all_gather.push mover=tiles", "C": "reduce_scatter.scatter mover=copy_kernel"}),
    Case("matmul", {"A": "all_gather.mesh mover=bulk_tiles", "C": "reduce_scatter.islands mover=tiles"}),
    Case("persistent", {"A": "all_gather.islands mover=bulk_kernel"}),
    Case("persistent", {"C": "all_reduce.ring mover=copy_kernel"}),
    Case("matmul", {"A": "all_to_all.receive mover=tiles", "C": "all_to_all.send mover=tiles"}),
    Case("persistent", {"A": "all_gather.push mover=copy_kernel", "C": "reduce_scatter.ring"}),
)


class Bound(NamedTuple):
    """What is bound, its plan, and the workspace that is not there."""

    bound: BoundPlan
    plan: Plan
    workspace: Any


def fused(case: Case, folder: Path, given: Mapping[str, Any], place: tuple[int, int]) -> tuple[Plan, AuthoredKernel]:
    """The plan and its kernel, made as `compile` makes them. place: the rank, of how many."""
    rank, ranks = place
    name, _ = GIVEN[case.file]
    fused = compile(f"{KERNELS / case.file}.py:{name}", case.exchanges)
    numbers = {name: value for name, value in given.items() if type(value) is int}
    space, plan = fused.kernel.space(numbers), fused.plan(numbers, ranks, "bfloat16", rank)
    options = fusion_options(plan, space, fused.schedules)
    function = load_generated(folder, fused.kernel.source.name, emit(fused.kernel, options))
    places = buffers_of_tensors(plan, space, fused.schedules)
    chosen = next((name for name, (tensor, _) in places.items() if tensor == options.dual_source), None)
    away = next((store for store in space.stores if store.tensor == options.stored_at_peers), None)
    persistent, shapes = fused.kernel.tile_loop is not None, shape_parameters(fused.kernel)
    return plan, AuthoredKernel(function, space, places, chosen, away, persistent, LAUNCH, shapes)


def bound(case: Case, folder: Path, given: Mapping[str, Any], place: tuple[int, int] = (0, 2)) -> Bound:
    """The plan of a kernel, bound."""
    rank, ranks = place
    plan, kernel = fused(case, folder, given, place)
    space_of_rank = workspace(rank, ranks)
    example = exchanged_tensors(kernel, given)
    made = BoundPlan(plan, space_of_rank, example, author=FusedTiles(kernel, given))
    assert all(copies._drain is drain for _, copies in made._queues)  # before a graph is made
    return Bound(made, plan, space_of_rank)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernels(case: Case, launched: list[str], waited: list[tuple[int, int]], tmp_path: Path) -> None:
    name, make = GIVEN[case.file]
    given = make(case.exchanges)
    call = bound(case, tmp_path, given)
    own = {"A": "a_ptr", "B": "b_ptr", "C": "c_ptr"} if case.file == "matmul" else {"A": "a_desc", "C": "c_desc"}
    values = {tensor: given[own[tensor]] for tensor in case.exchanges}
    tensors = {tensor: getattr(value, "base", value) for tensor, value in values.items()}
    call.bound.launch_prologue(CALLER.cuda_stream)
    for enqueue in call.bound.enqueue:
        enqueue(CALLER, tensors, addresses_of(tensors, given))
    words = " ".join(case.exchanges.values())
    kinds = {"begin_kernel": True, name: True, "copy_kernel": "_kernel" in words.replace("mover=copy_engine", "")}
    assert {kind: kind in launched for kind in kinds} == kinds, launched
    assert launched.count(name) == 1
    waits_needed = check_waits(call.plan, call.workspace, launched, waited)
    assert bool(waits_needed) == case.exchanges.get("C", "").startswith("all_to_all")


@pytest.mark.parametrize("file", GIVEN)
def test_sums_that_wait_keep_no_block_from_its_tile(
    file: str, launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that take one tile each may start last: the sums begin when all tiles are claimed."""
    case = Case(file, {"C": "reduce_scatter.scatter"})
    given = GIVEN[file][1](case.exchanges)
    waited: list[tuple[int, ...]] = []
    call = bound(case, tmp_path, given)
    monkeypatch.setattr(driver, "wait_value", lambda *step: waited.append((*step, "reduction_kernel" in launched)))
    tensor = given["c_ptr"] if file == "matmul" else given["c_desc"].base
    for enqueue in call.bound.enqueue:
        enqueue(CALLER, {"C": tensor}, addresses_of({"C": tensor}, given))
    claims, tiles = call.workspace.claims.data_ptr(), (M // 128) * (N // 128)
    is_gated = (SIDE_STREAM.cuda_stream, claims, tiles, False) in waited
    assert is_gated == (file == "matmul")
    assert "reduction_kernel" in launched


def by_hand(everywhere: bool) -> ow.Reduction:
    """Of two ranks: pushed by a kernel, and pulled, one part of the rows by columns, which the library adds."""
    half = M // 2
    moves: list[ow.Put | ow.Get | ow.Sum] = [
        ow.Put(0, 1, ow.Chunk((half, M)), mover="bulk_kernel"),
        ow.Get(0, 1, ow.Chunk((0, half // 2))),
        ow.Get(0, 1, ow.Chunk((half // 2, half), (0, N // 2)), lane=1),
        ow.Get(0, 1, ow.Chunk((half // 2, half), (N // 2, N)), lane=1),
    ]
    if everywhere:
        moves += [ow.Sum(0, ow.Chunk((0, half))), ow.Sum(1, ow.Chunk((half, M)))]
        moves += [ow.Get(1, 0, ow.Chunk((0, half))), ow.Put(1, 0, ow.Chunk((half, M)))]
    return ow.Reduction(2, tuple(moves), everywhere)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("everywhere", [False, True])
def test_sums_written_by_hand(
    everywhere: bool, rank: int, launched: list[str], waited: list[tuple[int, int]], tmp_path: Path
) -> None:
    exchanges: dict[str, Any] = {"C": by_hand(everywhere)}
    given = matmul({"C": "" if everywhere else "reduce_scatter"})
    call = bound(Case("matmul", exchanges), tmp_path, given, (rank, 2))
    for enqueue in call.bound.enqueue:
        enqueue(CALLER, {"C": given["c_ptr"]}, addresses_of({"C": given["c_ptr"]}, given))
    assert launched.count("matmul_kernel") == 1
    assert ("copy_kernel" in launched) == (rank == 0)
    assert launched.count("reduction_kernel") == 1
    assert not check_waits(call.plan, call.workspace, launched, waited)


def test_what_no_kernel_would_hear_of_is_waited_for_at_the_end(
    launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("matmul", {"A": "all_gather.push"})
    given = matmul(case.exchanges)
    monkeypatch.setattr(
        launcher, "waits_without_deadline", lambda plan, rank: (Wait(plan.schedule.pads[0].name, (0, 1), 1),)
    )
    call = bound(case, tmp_path, given)
    for enqueue in call.bound.enqueue:
        enqueue(CALLER, {"A": given["a_ptr"]}, addresses_of({"A": given["a_ptr"]}, given))
    assert launched[-2:] == ["matmul_kernel", "wait_kernel"]


def test_blocks_written_by_hand(launched: list[str], tmp_path: Path) -> None:
    half = M // 2
    moves = (
        ow.Put(0, 1, ow.Chunk((half, M)), mover="copy_kernel"),
        ow.Put(1, 0, ow.Chunk((0, half)), mover="copy_kernel"),
    )
    exchanges: dict[str, Any] = {"C": ow.AllToAll(2, moves, sends=True)}
    given = matmul({})
    call = bound(Case("matmul", exchanges), tmp_path, given)
    for enqueue in call.bound.enqueue:
        enqueue(CALLER, {"C": given["c_ptr"]}, addresses_of({"C": given["c_ptr"]}, given))
    assert {"matmul_kernel", "copy_kernel"} <= set(launched)


@pytest.mark.parametrize("mover", MOVERS)
def test_a_rank_without_rows_takes_part_in_the_exchange(mover: str, launched: list[str], tmp_path: Path) -> None:
    """Five rows on four ranks: the last one has none, gathers them all the same, and peers count on it."""
    case = Case("matmul", {"A": f"all_gather.push mover={mover}"})
    given = matmul(case.exchanges) | {"M": 5, "a_ptr": torch.zeros(0, K, dtype=DTYPE)}
    call = bound(case, tmp_path, given, (3, 4))
    for enqueue in call.bound.enqueue:
        enqueue(CALLER, {"A": given["a_ptr"]}, addresses_of({"A": given["a_ptr"]}, given))
    assert launched.count("matmul_kernel") == 1


class DryProgram:
    """A TileProgram of two ranks whose calls are launched as on a GPU that is not there."""

    rank, world_size = 0, 2
    kernels: list[Any]

    def __init__(self, buffers: Mapping[str, Any], channels: Mapping[str, Any]) -> None:
        self.declared = Declared(dict(buffers), dict(channels))
        group: Any = None
        self.run = handwritten_gpu.HandwrittenRun(self.declared, group, torch.device("cpu"))

    @contextmanager
    def call(self) -> Iterator[TileCall]:
        program: Any = self
        call = TileCall(program)
        yield call
        self.run(b"call", call.steps)


@pytest.fixture
def launches(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Of each launch of a kernel fused by hand: its name, and how many variants of it there are by then."""
    made: list[tuple[str, int]] = []

    def workspace_of(group: object, device: torch.device) -> Any:
        space, heaps = workspace(), list[HostHeap]()
        space.board = SimpleNamespace(post=lambda signature: None)
        space.current_stream = space.enter = lambda: CALLER
        space.leave = lambda stream: None
        space.lease = lambda layout: heaps[0] if heaps else heaps.__iadd__([HostHeap(layout.size_bytes)])[0]
        return space

    def variants(kernel: JITFunction[Any]) -> int:
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    def launch(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
        def launched_with(*arguments: Any, **options: Any) -> None:
            before = variants(kernel)
            kernel.warmup(*arguments, grid=grid, **options)
            made.append((kernel.__name__, variants(kernel) - before))

        return launched_with

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        yield

    event = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(handwritten_gpu, "Workspace", SimpleNamespace(of=workspace_of))
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(ow, "TileProgram", DryProgram)
    return made


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=DTYPE)


def ring() -> Callable[[], object]:
    operator = MatmulReduceScatter(512, 256, DTYPE, block=(128, 128), moved=(64, 256), ring=8)
    return lambda: operator(zeros(512, 128), zeros(128, 256), num_warps=8, num_stages=3)


def experts() -> Callable[[], object]:
    operator = AllGatherExperts((256, 2, 4, 128, 256), DTYPE, block=64, moved=(64, 128))
    chosen = torch.arange(512).view(256, 2) % 4
    return lambda: operator(zeros(128, 128), chosen, zeros(4, 128, 256), num_warps=8)


def attention() -> Callable[[], object]:
    operator = GatheredAttention((512, 4, 64), DTYPE)
    return lambda: operator(*(zeros(256, 4, 64) for _ in range(3)), num_warps=4)


@pytest.mark.parametrize("make", [ring, experts, attention])
def test_kernels_fused_by_hand_are_compiled_before_a_call_begins(
    make: Callable[[], Callable[[], object]], launches: list[tuple[str, int]]
) -> None:
    call = make()
    call()
    call()
    (first, made_by_first), (second, made_by_second) = launches
    assert (first, made_by_first, made_by_second) == (second, 0, 0)


def test_a_descriptor_keeps_its_own_shape_and_padding_wherever_it_moves() -> None:
    said = TensorDescriptor(torch.zeros(64, 64), [48, 32], [64, 1], [16, 16], "nan")
    stand = stand_in_for(said.base)
    described = _with_stand_in(said, stand)
    assert described.base is stand
    assert [getattr(described, name) for name in ("shape", "strides", "block_shape", "padding")] == [
        [48, 32],
        [64, 1],
        [16, 16],
        "nan",
    ]


def test_bulk_copies_between_tiles_need_shared_memory_of_their_own(launched: list[str]) -> None:
    device = torch.device("cpu")
    _check_shared("a_kernel", SHARED_BYTES - BETWEEN_SHARED_BYTES, device)
    with pytest.raises(ScheduleError, match="fewer stages"):
        _check_shared("a_kernel", SHARED_BYTES - BETWEEN_SHARED_BYTES + 1, device)

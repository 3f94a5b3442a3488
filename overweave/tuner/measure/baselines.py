"""The rows of a comparison: upper bounds (roofs), torch's operators, and ours.

`methods_of` returns the rows of an operator: those of every operator, and the baselines that its record names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from overweave.compat.torch_names import all_gather_single, reduce_scatter_single
from overweave.errors import PACKAGES, MachineError
from overweave.ir.epilogue import NO_EPILOGUE
from overweave.ir.operators.record import CallMatrix
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group
from overweave.memory.lower import CopyStep, MemoryRef
from overweave.runtime.library.epilogue import scaled_matmul
from overweave.runtime.library.library import as_movable, use_torch_kernels
from overweave.schedules.records import outside
from overweave.schedules.records.needs import unmet
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.measure.timer import MOST_INPUT_SETS
from overweave.tuner.measure.trial import CallResult, CheckedCall
from overweave.tuner.space.shapes import bare_product
from overweave.tuner.space.space import library_path
from overweave.tuner.space.target import target_of

# It is the upper bound for overlapped methods, which move their chunks in the same way.

try:
    from overweave.memory.cuda.copy_engine import CopyQueue
except ImportError:  # cuda-bindings is an extra: without it there is no copy engine to measure
    HAS_COPY_ENGINE = False
else:
    HAS_COPY_ENGINE = True

CopyPiece = tuple[int, int, int]  # offset in the sent tensor, offset in the peer's landing zone, length: all in bytes


class PeerCopies:
    """Pushes pieces of one tensor into the peers' landing zones. Built collectively. piece: peer -> the piece for it.
    landing_bytes: size of the zone of each rank, the same on every rank. rounds: how many times all of it is pushed."""

    def __init__(
        self, group: Group, device: torch.device, landing_bytes: int, piece: Callable[[int], CopyPiece], rounds: int = 1
    ) -> None:
        if not HAS_COPY_ENGINE:
            raise MachineError("measure the copy engine", "cuda-bindings is not installed", PACKAGES["cuda"])
        self._heap = CudaHeap(group, device, landing_bytes)
        self.stream = torch.cuda.Stream(device, priority=-1)
        steps = []
        for distance in range(1, group.world_size):
            peer = (group.rank - distance) % group.world_size
            source, target, length = piece(peer)
            if length:
                landing = MemoryRef(None, self._heap.addresses[peer] + target, length)
                steps.append(CopyStep(MemoryRef("sent", source, length), landing, length, 1))
        self._queue = CopyQueue(tuple(steps) * rounds)

    def start(self, sent: torch.Tensor) -> None:
        """Begin to push, on a side stream, behind the work on the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        addresses = {"sent": sent.data_ptr()}
        if not torch.cuda.is_current_stream_capturing():
            self._queue.prepare(self.stream.cuda_stream, addresses)
        self._queue.launch(self.stream.cuda_stream, addresses)

    def join(self) -> None:
        """Make the current stream wait for the pushes."""
        torch.cuda.current_stream().wait_stream(self.stream)


CACHE_BYTES = 128 << 20  # twice the L2 of a Hopper GPU: all input sets together exceed it, so that none stays there
FP8 = torch.float8_e4m3fn


class OperatorCall(Protocol):
    """An operator on local tensors, with the epilogue of its problem."""

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, plan: str | None
    ) -> CallResult: ...


class Setting(Struct, frozen=True):
    """Group, device and dtype of a comparison, and the function that returns our operator's call for a problem."""

    group: Group
    device: torch.device
    dtype: torch.dtype
    operator_for: Callable[[Problem], OperatorCall]


class BenchSide:
    """One operator on one rank's part of a problem. Calls take the number of the sample and return a result to compare.

    xs, ws: what a rank passes, one tensor for each input set.
    lefts, rights: the factors of its matmul alone, of all columns, of every weight and of a gate.
    product_dtype: of products. ones: the scales of rows and of columns, for fp8.

    If the problem is more than a bare product, the sequential baseline is our library plan, which runs torch and NCCL.
    Collective: making one maps memory of peers.
    """

    def __init__(self, problem: Problem, setting: Setting) -> None:
        self.problem, self.setting, self.is_bare = problem, setting, problem == bare_product(problem)
        self._operator = setting.operator_for(problem)
        record, m, n, k = problem.record, problem.m, problem.multiplied_columns, problem.k
        self.rows = shard_rows(m, setting.group.world_size, setting.group.rank)
        self.product_dtype = torch.bfloat16 if setting.dtype == FP8 else setting.dtype
        self.ones: list[torch.Tensor] = []
        sets = _input_sets((m * k + k * n) * setting.dtype.itemsize)
        whole = [_random((m, k), seed, setting) for seed in _seeds(record.x, sets, setting)]
        self.xs = [each[slice(*self.rows)].clone() for each in whole] if record.has_row_shards else whole
        self.lefts = whole if record.gathers else self.xs
        self.rights = self._weights((k, n), _seeds(record.w, sets, setting, MOST_INPUT_SETS))
        own_rows = slice(*problem.weight_rows(setting.group.rank))
        self.ws = [each[own_rows].clone() for each in self.rights] if record.gathers_weight else self.rights
        self._places = _Places(self, n)
        self.symmetric = torch.empty(0, dtype=self.product_dtype)  # the product, for torch's own all-reduces
        if record.shares_sums and setting.device.type == "cuda" and m:
            size = m * n * self.product_dtype.itemsize
            self.symmetric = CudaHeap(setting.group, setting.device, size).view(0, (m, n), self.product_dtype)

    def _weights(self, extents: tuple[int, int], seeds: range) -> list[torch.Tensor]:
        """Return weights `[k, n]`, of fp8 stored as `[n, k]`; sets `scales` for fp8."""
        weights = [_random(extents, seed, self.setting) for seed in seeds]
        if self.setting.dtype != FP8:
            return weights
        shapes = (max(self.problem.m, 1), 1), (1, extents[1])
        self.ones = [torch.ones(shape, dtype=torch.float32, device=self.setting.device) for shape in shapes]
        return [w.t().contiguous().t() for w in weights]

    def factors(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank passes as sample `sample`."""
        return _set_of_turn(self.xs, sample), _set_of_turn(self.ws, sample)

    def multiply(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product by cuBLAS: of fp8 scaled by rows, with ones, into bf16."""
        if not self.ones:
            return torch.mm(x, w) if out is None else torch.mm(x, w, out=out)
        y = torch.empty(x.shape[0], w.shape[1], dtype=self.product_dtype, device=x.device) if out is None else out
        scaled_matmul(x, w, (self.ones[0][: x.shape[0]], self.ones[1]), y)
        return y

    def ours(self, sample: int, plan: str | None) -> CallResult:
        """Run our operator with a plan."""
        return self._operator(*self.factors(sample), self.setting.group.process_group, plan=plan)

    def matmul(self, sample: int) -> CallResult:
        """Run the matmul alone."""
        return self.multiply(_set_of_turn(self.lefts, sample), _set_of_turn(self.rights, sample))

    def communicate(self, sample: int) -> CallResult:
        """Run the collective alone."""
        return self._by_reference(sample, multiplies=False)

    def sequential(self, sample: int) -> CallResult:
        """Run the reference of the operator's record, as a user would write it; if it has an epilogue, our library
        plan."""
        if not self.is_bare:
            return self.ours(sample, str(library_path(self.problem.operator)))
        return self._by_reference(sample, multiplies=True)

    def _by_reference(self, sample: int, multiplies: bool) -> torch.Tensor:
        (x, w), record = self.factors(sample), self.problem.record
        tensors = {"x": _set_of_turn(self._places.shards, sample) if record.gathers else x, "w": w}
        result: torch.Tensor = record.reference(tensors, _Library(self, self._places, multiplies))
        return result

    def start_copies(self, sample: int) -> torch.Tensor:
        copies, sent = self._places.copies, _set_of_turn(self._places.sent, sample)
        assert copies is not None
        copies.start(sent)
        return sent

    def join_copies(self) -> None:
        assert self._places.copies is not None
        self._places.copies.join()


class _Places:
    """Buffers of a reference's collectives, made once. NCCL needs equal shards, so short ones are padded.

    whole: what was gathered, or every rank's rows of the product.     shards: what is gathered.
    product: where the matmul writes, if the product travels.     sum: where sums go.
    sent: what the copy engine pushes to peers, by sample; twice for an all-reduce, since sums travel too.
    """

    def __init__(self, side: BenchSide, cols: int) -> None:
        group, record, setting, m = side.setting.group, side.problem.record, side.setting, side.problem.m
        height, (lo, hi) = -(-m // group.world_size), side.rows
        width, dtype = (side.problem.k, setting.dtype) if record.gathers else (cols, side.product_dtype)

        def zeros(rows: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=torch.float32, device=setting.device).to(dtype)

        self.whole, self.product, self.shards = zeros(height * group.world_size), None, []
        if record.gathers:
            self.sent, padding = side.xs, (0, 0, 0, height - (hi - lo))
            self.shards = [torch.nn.functional.pad(as_movable(x), padding) for x in side.xs]
        elif record.adds or record.exchanges:
            self.sent, self.product = [self.whole], self.whole[:m]
        else:
            self.sent = self.shards = [zeros(height)]
            self.product = self.shards[0][: hi - lo]
        # Zeros, since an all-reduce alone sums it again and again: it must not overflow.
        self.sum = zeros(m if record.shares_sums or record.exchanges else height)
        self.copies = None
        if setting.device.type == "cuda" and HAS_COPY_ENGINE:
            pieces, rounds = _pieces(side, height, width * dtype.itemsize), 2 if record.shares_sums else 1
            self.copies = PeerCopies(group, setting.device, self.whole.nbytes, pieces, rounds=rounds)


class _Library(NamedTuple):
    """The functions of a reference, one library call each. multiplies: False leaves out the matmul: a tensor of the
    right shape stands for the product."""

    side: BenchSide
    places: _Places
    multiplies: bool

    def matmul(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = self.places.product
        if self.multiplies:
            return self.side.multiply(x, w, product)
        return x if product is None else self.places.sum if self.side.problem.record.shares_sums else product

    def all_gather(self, shard: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """Return the gathered rows. shard: padded, or the rows of the product without padding; rows: of a weight, not
        padded."""
        if rows is not None:
            group = self.side.setting.group
            height = -(-rows // group.world_size)
            padded = torch.nn.functional.pad(shard, (0, 0, 0, height - shard.shape[0]))
            whole = shard.new_empty(height * group.world_size, shard.shape[1])
            all_gather_single(whole, padded, group=group.process_group)
            return whole[:rows]
        sent = shard if self.places.product is None else self.places.shards[0]
        all_gather_single(as_movable(self.places.whole), sent, group=self.side.setting.group.process_group)
        return self.places.whole[: self.side.problem.m]

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part, group=self.side.setting.group.process_group)
        return part

    def reduce_scatter(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum. part: the rows of `whole` without padding."""
        (lo, hi), places = self.side.rows, self.places
        reduce_scatter_single(places.sum, places.whole, group=self.side.setting.group.process_group)
        return places.sum[: hi - lo]

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the exchanged blocks, of equal numbers of rows."""
        received = self.places.sum if self.places.product is not None else self.places.whole
        dist.all_to_all_single(as_movable(received), as_movable(blocks), group=self.side.setting.group.process_group)
        return received


def _pieces(side: BenchSide, height: int, row_bytes: int) -> Callable[[int], CopyPiece]:
    """Return peer -> Piece for PeerCopies: each peer's rows of a sum or of blocks, or this rank's own."""
    group, is_per_peer = side.setting.group, side.problem.record.adds or side.problem.record.exchanges

    def piece(peer: int) -> CopyPiece:
        lo, hi = shard_rows(side.problem.m, group.world_size, peer) if is_per_peer else side.rows
        return (lo if is_per_peer else 0) * row_bytes, group.rank * height * row_bytes, (hi - lo) * row_bytes

    return piece


def _set_of_turn(sets: list[torch.Tensor], sample: int) -> torch.Tensor:
    return sets[sample % len(sets)]


def _seeds(operand: CallMatrix, sets: int, setting: Setting, beyond: int = 0) -> range:
    """Return the seeds of the input sets: the same on all ranks for a whole matrix or shards of rows of one."""
    is_own = operand.along not in (None, "m") or (operand.along is None and operand.ownership == "sharded")
    first = 1000 * (setting.group.rank + 1) + beyond if is_own else beyond
    return range(first, first + sets)


def _input_sets(bytes_per_set: int) -> int:
    """Return how many input sets are needed: two or four."""
    return 2 if 2 * bytes_per_set >= CACHE_BYTES else MOST_INPUT_SETS


def _random(shape: tuple[int, int], seed: int, setting: Setting) -> torch.Tensor:
    """Return standard normal values: a matmul of zeros draws less power, and so runs faster, than any real one."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    dtype = torch.bfloat16 if setting.dtype == FP8 else setting.dtype
    return torch.randn(shape, generator=generator, dtype=dtype, device=setting.device).to(setting.dtype)


class BaselineMethod(NamedTuple):
    """A row of the comparison. call: the timed call of an operator's inputs (Side); its argument is the sample's
    number.

    is_roof: an upper bound that others are compared with; the others compute the operator, and are checked before they
    are timed. lacks: why it cannot run on a side; "" if it can. plan: of ours, as the operators' `plan=` takes it.
    """

    name: str
    label: str
    call: Callable[[BenchSide, int], CallResult]
    is_roof: bool = False
    lacks: Callable[[BenchSide], str] = lambda side: ""
    plan: str = ""

    def of(self, side: BenchSide) -> CheckedCall:
        """Return the call on one side."""
        return lambda sample: self.call(side, sample)


def _copy_engine(side: BenchSide) -> str:
    return "" if side.setting.device.type == "cuda" and HAS_COPY_ENGINE else "needs CUDA and cuda-bindings"


def _copies(side: BenchSide, sample: int) -> CallResult:
    sent = side.start_copies(sample)
    side.join_copies()
    return sent


def _ceiling(side: BenchSide, sample: int) -> CallResult:
    side.start_copies(sample)
    result = side.matmul(sample)
    side.join_copies()
    return result


MATMUL, COMMUNICATION, COPIES, CEILING = "matmul", "communication", "copies", "ceiling"
SEQUENTIAL, OURS = "sequential", "overweave"
NAMED = "plan."  # prefix of the rows of plans that the caller named
ROOFS = (
    BaselineMethod(MATMUL, "matmul alone", BenchSide.matmul, True),
    BaselineMethod(COMMUNICATION, "communication: library", BenchSide.communicate, True),
    BaselineMethod(COPIES, "communication: copy engine", _copies, True, _copy_engine),
    BaselineMethod(CEILING, "ceiling: matmul beside copies", _ceiling, True, _copy_engine),
)
LIBRARY = BaselineMethod(SEQUENTIAL, "library: collective and matmul", BenchSide.sequential)


@use_torch_kernels()
def _fused(side: BenchSide, sample: int) -> CallResult:
    """Run torch's fused operator: a gather or a reduce-scatter cut into shards beside their matmuls."""
    (x, w), name, ops = side.factors(sample), side.setting.group.name, torch.ops.symm_mem
    result: torch.Tensor
    if side.problem.record.gathers and side.ones:
        own_scales, column_scales = side.ones[0][: x.shape[0]], side.ones[1]
        outputs = ops.fused_all_gather_scaled_matmul(
            x, [w], own_scales, [column_scales], 0, name, [None], [None], [side.product_dtype], [False]
        )
        result = outputs[1][0]
    elif side.problem.record.gathers:
        result = ops.fused_all_gather_matmul(x, [w], 0, name, return_A=False)[1][0]
    elif side.ones:
        shape = [side.problem.m, w.shape[1]]
        result = ops.fused_scaled_matmul_reduce_scatter(
            x, w, *side.ones, "sum", 0, 0, name, shape, out_dtype=side.product_dtype
        )
    else:
        result = ops.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
    return result


def _one_shot(side: BenchSide, sample: int) -> CallResult:
    side.multiply(*side.factors(sample), side.symmetric)
    result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(side.symmetric, "sum", side.setting.group.name)
    return result


def _two_shot(side: BenchSide, sample: int) -> CallResult:
    side.multiply(*side.factors(sample), side.symmetric)
    result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(side.symmetric, "sum", side.setting.group.name)
    return result


_BY_TORCH: dict[str, tuple[str, Callable[[BenchSide, int], CallResult]]] = {
    outside.TORCH_FUSED: ("torch: fused (symm_mem)", _fused),
    outside.TORCH_ONE_SHOT: ("torch: matmul, one-shot (symm_mem)", _one_shot),
    outside.TORCH_TWO_SHOT: ("torch: matmul, two-shot (symm_mem)", _two_shot),
}


def row_name(plan: str) -> str:
    """Return the name of a baseline's row, by its plan."""
    return plan.replace(".", "_")


TORCH = tuple(map(row_name, _BY_TORCH))
TORCH_FUSED = TORCH[0]


def call_of_plan(plan: str | None) -> Callable[[BenchSide, int], CallResult]:
    """Return the call of our operator with a named plan of the catalog, or (None) with the plan it chooses."""
    return lambda side, sample: side.ours(sample, plan)


def _of_plan(name: str, plan: str) -> BaselineMethod:
    return BaselineMethod(name, f"overweave, plan {plan}", call_of_plan(plan), plan=plan)


def _baseline(plan: str) -> BaselineMethod:
    """Return the row of a plan that the record of an operator names."""
    if plan not in _BY_TORCH:
        return _of_plan(row_name(plan), plan)
    label, by_torch = _BY_TORCH[plan]

    def call(side: BenchSide, sample: int) -> CallResult:
        return by_torch(side, sample) if side.is_bare else side.ours(sample, plan)

    def lacks(side: BenchSide) -> str:
        """Return why torch cannot run it. Of a bare product it scales fp8 itself, into `product_dtype`."""
        problem, product_dtype = side.problem, side.problem.result_dtype
        bare = replace(problem, epilogue=NO_EPILOGUE, dtype=product_dtype, out_dtype=None) if side.is_bare else problem
        return unmet(
            MethodRequest(bare, {}, target_of(side.setting.device, side.setting.group)),
            outside.OUTSIDE[plan].needs,
            "device",
        )

    return BaselineMethod(row_name(plan), label, call, lacks=lacks)


def methods_of(operator: str, plans: tuple[str, ...] = ()) -> tuple[BaselineMethod, ...]:
    """Return the rows of an operator. If plans are named, their rows replace those of ours."""
    baselines = [_baseline(plan) for plan in operator_of(operator).baselines]
    if not plans:
        return (*ROOFS, LIBRARY, *baselines, BaselineMethod(OURS, "overweave", call_of_plan(None)))
    named = (_of_plan(f"{NAMED}{plan}", plan) for plan in dict.fromkeys(plans))
    return (*ROOFS, LIBRARY, *(each for each in baselines if not each.plan), *named)

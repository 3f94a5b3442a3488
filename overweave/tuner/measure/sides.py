"""An operator on one problem, as a comparison calls it: its inputs, and what its record's reference takes in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from msgspec import Struct

from overweave.compat.torch_names import all_gather_single, reduce_scatter_single
from overweave.ir.operators.record import CallMatrix
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group
from overweave.runtime.library.library import movable
from overweave.runtime.library.scaled import scaled_matmul
from overweave.tuner.measure.peer_copies import HAS_COPY_ENGINE, CopyPiece, PeerCopies
from overweave.tuner.measure.replay import MOST_INPUT_SETS
from overweave.tuner.measure.trial import CallResult
from overweave.tuner.space.problem_words import bare
from overweave.tuner.space.space import library_path

CACHE_BYTES = 128 << 20  # twice the L2 of a Hopper GPU: input sets together exceed it, so none is found there
FP8 = torch.float8_e4m3fn


class OperatorCall(Protocol):
    """An operator on local tensors, with all that its problem has beside a bare product."""

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, plan: str | None
    ) -> CallResult: ...


class Setting(Struct, frozen=True):
    """Where a comparison runs, and what it calls ours on a problem."""

    group: Group
    device: torch.device
    dtype: torch.dtype
    operator_for: Callable[[Problem], OperatorCall]


class BenchSide:
    """One operator on one rank's part of a problem. Calls take the number of the sample and return a result to compare.

    xs, ws: what a rank passes. lefts, rights: the factors of its matmul alone, of all columns, of every weight and of
    a gate. kept: the dtype of products. scales: of rows and of columns, for fp8. Of more than a bare product the
    baselines are plans of the operator's own: what a library makes of several weights, extras and a norm.
    Collective: making one maps memory of peers.
    """

    def __init__(self, problem: Problem, setting: Setting) -> None:
        self.problem, self.setting, self.is_bare = problem, setting, problem == bare(problem)
        self._operator = setting.operator_for(problem)
        record, m, n, k = problem.record, problem.m, problem.multiplied_columns, problem.k
        self.rows = shard_rows(m, setting.group.world_size, setting.group.rank)
        self.kept = torch.bfloat16 if setting.dtype == FP8 else setting.dtype
        self.scales: list[torch.Tensor] = []
        sets = _input_sets((m * k + k * n) * setting.dtype.itemsize)
        whole = [_random((m, k), seed, setting) for seed in _seeds(record.x, sets, setting)]
        self.xs = [each[slice(*self.rows)].clone() for each in whole] if record.has_row_shards else whole
        self.lefts = whole if record.gathers else self.xs
        self.rights = self._weights((k, n), _seeds(record.w, sets, setting, MOST_INPUT_SETS))
        mine = slice(*problem.weight_rows(setting.group.rank))
        self.ws = [each[mine].clone() for each in self.rights] if record.gathers_weight else self.rights
        self._places = _Places(self, n)
        self.symmetric = torch.empty(0, dtype=self.kept)  # where torch's own all-reduces take the product
        if record.shares_sums and setting.device.type == "cuda" and m:
            size = m * n * self.kept.itemsize
            self.symmetric = CudaHeap(setting.group, setting.device, size).view(0, (m, n), self.kept)

    def _weights(self, extents: tuple[int, int], seeds: range) -> list[torch.Tensor]:
        """Weights `[k, n]`, of fp8 stored as `[n, k]`; and the scales of their columns, beside those of any rows."""
        made = [_random(extents, seed, self.setting) for seed in seeds]
        if self.setting.dtype != FP8:
            return made
        shapes = (max(self.problem.m, 1), 1), (1, extents[1])
        self.scales = [torch.ones(shape, dtype=torch.float32, device=self.setting.device) for shape in shapes]
        return [w.t().contiguous().t() for w in made]

    def factors(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a rank passes as sample `turn`."""
        return _of(self.xs, turn), _of(self.ws, turn)

    def multiply(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The library's product: of fp8 scaled by rows, with ones, into bf16."""
        if not self.scales:
            return torch.mm(x, w) if out is None else torch.mm(x, w, out=out)
        y = torch.empty(x.shape[0], w.shape[1], dtype=self.kept, device=x.device) if out is None else out
        scaled_matmul(x, w, (self.scales[0][: x.shape[0]], self.scales[1]), y)
        return y

    def ours(self, turn: int, plan: str | None) -> CallResult:
        return self._operator(*self.factors(turn), self.setting.group.process_group, plan=plan)

    def matmul(self, turn: int) -> CallResult:
        return self.multiply(_of(self.lefts, turn), _of(self.rights, turn))

    def communicate(self, turn: int) -> CallResult:
        return self._by_reference(turn, multiplies=False)

    def sequential(self, turn: int) -> CallResult:
        """The reference of the operator's record, as a user would write it; of more than a bare product ours."""
        if not self.is_bare:
            return self.ours(turn, str(library_path(self.problem.operator)))
        return self._by_reference(turn, multiplies=True)

    def _by_reference(self, turn: int, multiplies: bool) -> torch.Tensor:
        (x, w), record = self.factors(turn), self.problem.record
        tensors = {"x": _of(self._places.shards, turn) if record.gathers else x, "w": w}
        result: torch.Tensor = record.reference(tensors, _Library(self, self._places, multiplies))
        return result

    def start_copies(self, turn: int) -> torch.Tensor:
        copies, sent = self._places.copies, _of(self._places.sent, turn)
        assert copies is not None
        copies.start(sent)
        return sent

    def join_copies(self) -> None:
        assert self._places.copies is not None
        self._places.copies.join()


class _Places:
    """Buffers, made once, of what a reference asks of a library, which deals equal shards: what is short is padded.

    whole: what was gathered, or every rank's rows of the product. shards: what is gathered. product: where the matmul
    writes, if the product travels. sum: where sums go. sent: what the copy engine pushes to peers, by sample number:
    all of it as often as it travels, which is twice where sums are shared.
    """

    def __init__(self, side: BenchSide, cols: int) -> None:
        group, record, setting, m = side.setting.group, side.problem.record, side.setting, side.problem.m
        height, (lo, hi) = -(-m // group.world_size), side.rows
        width, dtype = (side.problem.k, setting.dtype) if record.gathers else (cols, side.kept)

        def zeros(rows: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=torch.float32, device=setting.device).to(dtype)

        self.whole, self.product, self.shards = zeros(height * group.world_size), None, []
        if record.gathers:
            self.sent, padding = side.xs, (0, 0, 0, height - (hi - lo))
            self.shards = [torch.nn.functional.pad(movable(x), padding) for x in side.xs]
        elif record.adds or record.exchanges:
            self.sent, self.product = [self.whole], self.whole[:m]
        else:
            self.sent = self.shards = [zeros(height)]
            self.product = self.shards[0][: hi - lo]
        # Of an all-reduce by itself, of zeros: summed again and again it must not grow.
        self.sum = zeros(m if record.shares_sums or record.exchanges else height)
        self.copies = None
        if setting.device.type == "cuda" and HAS_COPY_ENGINE:
            pieces, rounds = _pieces(side, height, width * dtype.itemsize), 2 if record.shares_sums else 1
            self.copies = PeerCopies(group, setting.device, self.whole.nbytes, pieces, rounds=rounds)


class _Library(NamedTuple):
    """What a reference is written in, one library call each.

    multiplies: else what travels, or has travelled, stands for the product.
    """

    side: BenchSide
    places: _Places
    multiplies: bool

    def matmul(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = self.places.product
        if self.multiplies:
            return self.side.multiply(x, w, product)
        return x if product is None else self.places.sum if self.side.problem.record.shares_sums else product

    def all_gather(self, shard: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """shard: padded, or the rows of the product that are no padding; rows: of a weight's shards, not padded."""
        if rows is not None:
            group = self.side.setting.group
            height = -(-rows // group.world_size)
            padded = torch.nn.functional.pad(shard, (0, 0, 0, height - shard.shape[0]))
            whole = shard.new_empty(height * group.world_size, shard.shape[1])
            all_gather_single(whole, padded, group=group.process_group)
            return whole[:rows]
        sent = shard if self.places.product is None else self.places.shards[0]
        all_gather_single(movable(self.places.whole), sent, group=self.side.setting.group.process_group)
        return self.places.whole[: self.side.problem.m]

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part, group=self.side.setting.group.process_group)
        return part

    def reduce_scatter(self, part: torch.Tensor) -> torch.Tensor:
        """part: the rows of the whole that are no padding."""
        (lo, hi), places = self.side.rows, self.places
        reduce_scatter_single(places.sum, places.whole, group=self.side.setting.group.process_group)
        return places.sum[: hi - lo]

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """blocks: of equal numbers of rows."""
        received = self.places.sum if self.places.product is not None else self.places.whole
        dist.all_to_all_single(movable(received), movable(blocks), group=self.side.setting.group.process_group)
        return received


def _pieces(side: BenchSide, height: int, row_bytes: int) -> Callable[[int], CopyPiece]:
    """For PeerCopies: each peer's rows of a sum or of blocks, or this rank's own, to their place where they land."""
    group, is_dealt = side.setting.group, side.problem.record.adds or side.problem.record.exchanges

    def piece(peer: int) -> CopyPiece:
        lo, hi = shard_rows(side.problem.m, group.world_size, peer) if is_dealt else side.rows
        return (lo if is_dealt else 0) * row_bytes, group.rank * height * row_bytes, (hi - lo) * row_bytes

    return piece


def _of(sets: list[torch.Tensor], turn: int) -> torch.Tensor:
    return sets[turn % len(sets)]


def _seeds(operand: CallMatrix, sets: int, setting: Setting, beyond: int = 0) -> range:
    """Of whole matrices that ranks have alike, or shards of rows of; and of each rank's own."""
    is_own = operand.along not in (None, "m") or (operand.along is None and operand.ownership == "sharded")
    first = 1000 * (setting.group.rank + 1) + beyond if is_own else beyond
    return range(first, first + sets)


def _input_sets(bytes_per_set: int) -> int:
    """Two or four sets."""
    return 2 if 2 * bytes_per_set >= CACHE_BYTES else MOST_INPUT_SETS


def _random(shape: tuple[int, int], seed: int, setting: Setting) -> torch.Tensor:
    """Standard normal: a matmul of zeros draws less power, and so runs faster, than any real one."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    dtype = torch.bfloat16 if setting.dtype == FP8 else setting.dtype
    return torch.randn(shape, generator=generator, dtype=dtype, device=setting.device).to(setting.dtype)

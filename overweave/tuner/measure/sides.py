"""An operator on one problem, as a comparison calls it: its inputs, and one method per way to compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from msgspec import Struct

from overweave.ir.operators.record import Operand
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import Group
from overweave.runtime.library.library import all_gather_flat, movable, reduce_scatter_flat
from overweave.runtime.library.scaled import scaled_matmul
from overweave.schedules.methods.outside import TORCH_FUSED, TORCH_ONE_SHOT, TORCH_TWO_SHOT
from overweave.tuner.measure.attempt import Result
from overweave.tuner.measure.peer_copies import HAS_COPY_ENGINE, PeerCopies
from overweave.tuner.space.problem_words import bare
from overweave.tuner.space.space import library_path

CACHE_BYTES = 128 << 20  # twice the L2 of a Hopper GPU: input sets together exceed it, so none is found there
MOST_INPUT_SETS = 4
FP8 = torch.float8_e4m3fn

Call = Callable[[int], Result]


class OperatorCall(Protocol):
    """An operator on local tensors, with all that its problem has beside a bare product."""

    def __call__(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, plan: str | None) -> Result: ...


class Setting(Struct, frozen=True):
    """Where a comparison runs, and what it calls ours on a problem."""

    group: Group
    device: torch.device
    dtype: torch.dtype
    operator_for: Callable[[Problem], OperatorCall]


class Side:
    """One operator on one rank's part of a problem. Calls take the number of the sample and return a result to compare.

    xs: what a rank passes. lefts, rights: the factors of its matmul alone, that of all columns, of every weight and of
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
        if record.adds:
            self._library: _Library = _Summed(self, n)
        else:
            height = self.rows[1] - self.rows[0]
            self._library = _Gathered(self, self.xs if record.gathers else [_empty(height, n, setting, self.kept)])
        if record.shares_sums and setting.device.type == "cuda" and m:
            size = m * n * self.kept.itemsize
            self._symmetric = CudaHeap(setting.group, setting.device, size).view(0, (m, n), self.kept)

    def _weights(self, extents: tuple[int, int], seeds: range) -> list[torch.Tensor]:
        """Weights `[k, n]`, of fp8 stored as `[n, k]`; and the scales of their columns, beside those of any rows."""
        made = [_random(extents, seed, self.setting) for seed in seeds]
        if self.setting.dtype != FP8:
            return made
        shapes = (max(self.problem.m, 1), 1), (1, extents[1])
        self.scales = [torch.ones(shape, dtype=torch.float32, device=self.setting.device) for shape in shapes]
        return [w.t().contiguous().t() for w in made]

    def matmul(self, turn: int) -> Result:
        return self.multiply(_of(self.lefts, turn), turn)

    def multiply(self, x: torch.Tensor, turn: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The library's product by the weight of a sample: of fp8 scaled by rows, with ones, into bf16."""
        w = _of(self.rights, turn)
        if not self.scales:
            return torch.mm(x, w) if out is None else torch.mm(x, w, out=out)
        y = torch.empty(x.shape[0], w.shape[1], dtype=self.kept, device=x.device) if out is None else out
        scaled_matmul(x, w, (self.scales[0][: x.shape[0]], self.scales[1]), y)
        return y

    def start_copies(self, turn: int) -> torch.Tensor:
        copies, sent = self._library.copies, _of(self._library.sent, turn)
        assert copies is not None
        copies.start(sent)
        return sent

    def join_copies(self) -> None:
        assert self._library.copies is not None
        self._library.copies.join()

    def ours(self, turn: int, plan: str | None) -> Result:
        return self._operator(_of(self.xs, turn), _of(self.rights, turn), self.setting.group.process_group, plan=plan)

    def communicate(self, turn: int) -> Result:
        return self._library.alone(turn)

    def sequential(self, turn: int) -> Result:
        if not self.is_bare:
            return self.ours(turn, str(library_path(self.problem.operator)))
        if self.problem.record.gathers:
            return self.multiply(self._library.run(turn), turn)
        self.multiply(_of(self.lefts, turn), turn, self._library.product)
        return self._library.run(turn)

    def torch_fused(self, turn: int) -> Result:
        if not self.is_bare:
            return self.ours(turn, TORCH_FUSED)
        return self._fused_gather(turn) if self.problem.record.gathers else self._fused_scatter(turn)

    def _fused_gather(self, turn: int) -> torch.Tensor:
        x, w, name = _of(self.xs, turn), _of(self.rights, turn), self.setting.group.name
        result: torch.Tensor
        if self.scales:
            own, by_column, out = self.scales[0][: x.shape[0]], [self.scales[1]], [self.kept]
            fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
            result = fused(x, [w], own, by_column, 0, name, [None], [None], out, [False])[1][0]
        else:
            result = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, name, return_A=False)[1][0]
        return result

    def _fused_scatter(self, turn: int) -> torch.Tensor:
        x, w, name = _of(self.xs, turn), _of(self.rights, turn), self.setting.group.name
        result: torch.Tensor
        if self.scales:
            fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
            shape = [self.problem.m, w.shape[1]]
            result = fused(x, w, *self.scales, "sum", 0, 0, name, shape, out_dtype=self.kept)
        else:
            result = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
        return result

    def torch_one_shot(self, turn: int) -> Result:
        if not self.is_bare:
            return self.ours(turn, TORCH_ONE_SHOT)
        self.multiply(_of(self.lefts, turn), turn, self._symmetric)
        result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(self._symmetric, "sum", self.setting.group.name)
        return result

    def torch_two_shot(self, turn: int) -> Result:
        if not self.is_bare:
            return self.ours(turn, TORCH_TWO_SHOT)
        self.multiply(_of(self.lefts, turn), turn, self._symmetric)
        result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(self._symmetric, "sum", self.setting.group.name)
        return result


class _Library(Protocol):
    """What the library does with what travels. product: where the matmul writes, if that travels. sent: what the copy
    engine pushes to peers, by sample number. run: the collective behind the matmul, or before it; alone: as it is timed
    by itself.
    """

    product: torch.Tensor
    sent: list[torch.Tensor]
    copies: PeerCopies | None

    def run(self, turn: int) -> torch.Tensor: ...

    def alone(self, turn: int) -> torch.Tensor: ...


class _Gathered(_Library):
    """All shards of rows. The library deals equal ones: short ones are padded, the padding is the result's tail."""

    def __init__(self, side: Side, shards: list[torch.Tensor]) -> None:
        group, device, self._m = side.setting.group, side.setting.device, side.problem.m
        height, cols, dtype = -(-self._m // group.world_size), shards[0].shape[1], shards[0].dtype
        (lo, hi), row_bytes = side.rows, cols * dtype.itemsize
        self._group, self.sent = group.process_group, shards
        self._padded = [torch.nn.functional.pad(movable(x), (0, 0, 0, height - (hi - lo))) for x in shards]
        self.product = self._padded[0][: hi - lo]
        self._gathered = _empty(height * group.world_size, cols, side.setting, dtype)
        self.copies = None
        if has_copies(side.setting):
            piece = (0, lo * row_bytes, (hi - lo) * row_bytes)
            self.copies = PeerCopies(group, device, self._gathered.nbytes, lambda peer: piece)

    def run(self, turn: int) -> torch.Tensor:
        all_gather_flat(movable(self._gathered), _of(self._padded, turn), group=self._group)
        return self._gathered[: self._m]

    alone = run


class _Summed(_Library):
    """The sum of all ranks' products: this rank's rows of it, or all.

    The library's reduce-scatter deals equal shards: rows past `m` stay zero. The copy engine's part is the scatter, and
    where sums are shared a gather as well.
    """

    def __init__(self, side: Side, cols: int) -> None:
        group, self._m, kept = side.setting.group, side.problem.m, side.kept
        self._group, self._height, self._own = group.process_group, -(-self._m // group.world_size), side.rows
        self._scatters, rows = side.problem.record.scatters, self._height * group.world_size
        self._partial = _empty(rows if self._scatters else self._m, cols, side.setting, kept)
        self._partial.zero_()
        self.product, self.sent = self._partial[: self._m], [self._partial]
        # Of an all-reduce by itself, of zeros: summed again and again it must not grow.
        self._sum = _empty(self._height if self._scatters else self._m, cols, side.setting, kept)
        self._sum.zero_()
        self.copies = None
        if has_copies(side.setting):
            row_bytes = cols * kept.itemsize
            rounds, pieces = 1 if self._scatters else 2, self._pieces(group, row_bytes)
            self.copies = PeerCopies(group, side.setting.device, rows * row_bytes, pieces, rounds=rounds)

    def _pieces(self, group: Group, row_bytes: int) -> Callable[[int], tuple[int, int, int]]:
        """For PeerCopies: each peer's rows of the partial, to this rank's place among what lands there."""

        def piece(peer: int) -> tuple[int, int, int]:
            lo, hi = shard_rows(self._m, group.world_size, peer)
            return lo * row_bytes, group.rank * self._height * row_bytes, (hi - lo) * row_bytes

        return piece

    def run(self, turn: int) -> torch.Tensor:
        if self._scatters:
            return self.alone(turn)
        dist.all_reduce(self._partial, group=self._group)
        return self._partial

    def alone(self, turn: int) -> torch.Tensor:
        if not self._scatters:
            dist.all_reduce(self._sum, group=self._group)
            return self._sum
        reduce_scatter_flat(self._sum, self._partial, group=self._group)
        return self._sum[: self._own[1] - self._own[0]]


def has_copies(setting: Setting) -> bool:
    """Whether the copy engine can be measured."""
    return setting.device.type == "cuda" and HAS_COPY_ENGINE


def _of(sets: list[torch.Tensor], turn: int) -> torch.Tensor:
    return sets[turn % len(sets)]


def _seeds(operand: Operand, sets: int, setting: Setting, beyond: int = 0) -> range:
    """Of whole matrices that ranks have alike, or shards of rows of; and of each rank's own."""
    first = beyond if operand.along in (None, "m") else 1000 * (setting.group.rank + 1) + beyond
    return range(first, first + sets)


def _input_sets(bytes_per_set: int) -> int:
    """Two or four: an even number, so that with the two slots of a workspace, too, tensors soon come back."""
    return 2 if 2 * bytes_per_set >= CACHE_BYTES else MOST_INPUT_SETS


def _random(shape: tuple[int, int], seed: int, setting: Setting) -> torch.Tensor:
    """Standard normal: a matmul of zeros draws less power, and so runs faster, than any real one."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    dtype = torch.bfloat16 if setting.dtype == FP8 else setting.dtype
    return torch.randn(shape, generator=generator, dtype=dtype, device=setting.device).to(setting.dtype)


def _empty(rows: int, cols: int, setting: Setting, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, cols, dtype=dtype, device=setting.device)

"""An operator on one case, as a comparison calls it: its inputs, and one method per way to compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from msgspec import Struct

from overweave.errors import InputError
from overweave.ir.plan import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.cuda_heap import CudaHeap
from overweave.memory.group import Group
from overweave.runtime.library import all_gather_flat, movable, reduce_scatter_flat
from overweave.runtime.scaled import scaled_matmul
from overweave.tuner.attempt import Result
from overweave.tuner.peer_copies import HAS_COPY_ENGINE, PeerCopies

CACHE_BYTES = 128 << 20  # twice the L2 of a Hopper GPU: input sets together exceed it, so none is found there
MOST_INPUT_SETS = 4
FP8 = torch.float8_e4m3fn

Call = Callable[[int], Result]


class OperatorCall(Protocol):
    """The public operator on local tensors."""

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, m: int, plan: str | None
    ) -> Result: ...


class Setting(Struct, frozen=True):
    """Where a comparison runs and what it calls ours: on a bare product `operator`, else what `dress` makes of one."""

    group: Group
    device: torch.device
    dtype: torch.dtype
    operator: OperatorCall
    dress: Callable[[Problem], OperatorCall] | None = None


class Side:
    """One operator on one case, on this rank. Calls take the number of the sample and return a result to compare.

    lefts, rights: the factors of the matmul alone. sent: what the copy engine pushes to peers, by sample number.
    kept: the dtype of products. scales: of rows and of columns, for fp8.
    """

    def __init__(self, m: int, setting: Setting) -> None:
        self.setting, self.m = setting, m
        self.shard = -(-m // setting.group.world_size)
        self.rows = shard_rows(m, setting.group.world_size, setting.group.rank)
        self.lefts: list[torch.Tensor] = []
        self.rights: list[torch.Tensor] = []
        self.xs: list[torch.Tensor] = []
        self.sent: list[torch.Tensor] = []
        self.copies: PeerCopies | None = None
        self.kept = torch.bfloat16 if setting.dtype == FP8 else setting.dtype
        self.scales: list[torch.Tensor] = []

    def weights(self, extents: tuple[int, int], seeds: range) -> list[torch.Tensor]:
        """Weights `[k, n]`, of fp8 stored as `[n, k]`; and the scales of their columns, beside those of any rows."""
        made = [_random(extents, seed, self.setting) for seed in seeds]
        if self.setting.dtype != FP8:
            return made
        shapes = (max(self.m, 1), 1), (1, extents[1])
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
        assert self.copies is not None
        self.copies.start(_of(self.sent, turn))
        return _of(self.sent, turn)

    def join_copies(self) -> None:
        assert self.copies is not None
        self.copies.join()

    def ours(self, turn: int, plan: str | None) -> Result:
        x, w = _of(self.xs, turn), _of(self.rights, turn)
        return self.setting.operator(x, w, self.setting.group.process_group, m=self.m, plan=plan)

    def communicate(self, turn: int) -> Result:
        raise NotImplementedError

    def sequential(self, turn: int) -> Result:
        raise NotImplementedError

    def torch_fused(self, turn: int) -> Result:
        raise NotImplementedError

    def torch_one_shot(self, turn: int) -> Result:
        raise NotImplementedError

    def torch_two_shot(self, turn: int) -> Result:
        raise NotImplementedError


class AllGatherMatmul(Side):
    """`all_gather(x) @ w`: x `[S, k]` of this rank, w `[k, n]`, result `[m, n]`; S = ceil(m / world_size).

    The library's all-gather deals equal shards: short ones are padded, and the padding is the tail of the result.
    """

    def __init__(self, m: int, n: int, k: int, setting: Setting) -> None:
        super().__init__(m, setting)
        n = -(-n // setting.group.world_size)
        sets = _input_sets((m * k + k * n) * setting.dtype.itemsize)
        (lo, hi), row_bytes = self.rows, k * setting.dtype.itemsize
        self.lefts = [_random((m, k), seed, setting) for seed in range(sets)]
        self.rights = self.weights((k, n), _own_seeds(sets, setting))
        self.xs = self.sent = [whole[lo:hi].clone() for whole in self.lefts]
        self._padded = [torch.nn.functional.pad(movable(x), (0, 0, 0, self.shard - (hi - lo))) for x in self.xs]
        self._gathered = _empty(self.shard * setting.group.world_size, k, setting, setting.dtype)
        if has_copies(setting):
            piece = (0, lo * row_bytes, (hi - lo) * row_bytes)
            self.copies = PeerCopies(setting.group, setting.device, self._gathered.nbytes, lambda peer: piece)

    def communicate(self, turn: int) -> torch.Tensor:
        all_gather_flat(movable(self._gathered), _of(self._padded, turn), group=self.setting.group.process_group)
        return self._gathered[: self.m]

    def sequential(self, turn: int) -> torch.Tensor:
        return self.multiply(self.communicate(turn), turn)

    def torch_fused(self, turn: int) -> torch.Tensor:
        x, w, name = _of(self.xs, turn), _of(self.rights, turn), self.setting.group.name
        result: torch.Tensor
        if self.scales:
            own, by_column, out = self.scales[0][: x.shape[0]], [self.scales[1]], [self.kept]
            fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
            result = fused(x, [w], own, by_column, 0, name, [None], [None], out, [False])[1][0]
        else:
            result = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, name, return_A=False)[1][0]
        return result


class _Partials(Side):
    """What ends with a sum over ranks: x `[m, k]` and w `[k, n]` of this rank, its part of the reduced axis."""

    def __init__(self, m: int, n: int, k: int, setting: Setting) -> None:
        super().__init__(m, setting)
        k = -(-k // setting.group.world_size)
        sets = _input_sets((m * k + k * n) * setting.dtype.itemsize)
        self.lefts = self.xs = [_random((m, k), seed, setting) for seed in _own_seeds(sets, setting)]
        self.rights = self.weights((k, n), _own_seeds(sets, setting, MOST_INPUT_SETS))

    def pieces(self, row_bytes: int) -> Callable[[int], tuple[int, int, int]]:
        """For PeerCopies: each peer's rows of the partial, to this rank's place among what lands there."""
        group = self.setting.group

        def piece(peer: int) -> tuple[int, int, int]:
            lo, hi = shard_rows(self.m, group.world_size, peer)
            return lo * row_bytes, group.rank * self.shard * row_bytes, (hi - lo) * row_bytes

        return piece


class MatmulReduceScatter(_Partials):
    """`reduce_scatter(x @ w)`: x `[m, k]` and w `[k, n]` of this rank, result its `[S, n]`; S = ceil(m / world_size).

    The library's reduce-scatter deals equal shards: rows past `m` stay zero. The copy engine's part is the scatter.
    """

    def __init__(self, m: int, n: int, k: int, setting: Setting) -> None:
        super().__init__(m, n, k, setting)
        group = setting.group
        self._partial = _empty(self.shard * group.world_size, n, setting, self.kept)
        self._partial.zero_()
        self._sum = _empty(self.shard, n, setting, self.kept)
        self.sent = [self._partial]
        if has_copies(setting):
            row_bytes = n * self.kept.itemsize
            self.copies = PeerCopies(group, setting.device, self._partial.nbytes, self.pieces(row_bytes))

    def communicate(self, turn: int) -> torch.Tensor:
        reduce_scatter_flat(self._sum, self._partial, group=self.setting.group.process_group)
        return self._sum[: self.rows[1] - self.rows[0]]

    def sequential(self, turn: int) -> torch.Tensor:
        self.multiply(_of(self.lefts, turn), turn, self._partial[: self.m])
        return self.communicate(turn)

    def torch_fused(self, turn: int) -> torch.Tensor:
        x, w, name = _of(self.xs, turn), _of(self.rights, turn), self.setting.group.name
        result: torch.Tensor
        if self.scales:
            fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
            shape = [self.m, w.shape[1]]
            result = fused(x, w, *self.scales, "sum", 0, 0, name, shape, out_dtype=self.kept)
        else:
            result = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, name)
        return result


class MatmulAllReduce(_Partials):
    """`all_reduce(x @ w)`: x `[m, k]` and w `[k, n]` of this rank, result `[m, n]`.

    The copy engine's part is a scatter and a gather. torch's own all-reduces work on symmetric memory, into which the
    matmul writes.
    """

    def __init__(self, m: int, n: int, k: int, setting: Setting) -> None:
        super().__init__(m, n, k, setting)
        group, dtype = setting.group, self.kept
        self._partial, self._alone = _empty(m, n, setting, dtype), _empty(m, n, setting, dtype)
        self._alone.zero_()  # summed again and again: it must not grow
        self.sent = [self._partial]
        if setting.device.type == "cuda" and m:
            size = m * n * dtype.itemsize
            self._symmetric = CudaHeap(group, setting.device, size).view(0, (m, n), dtype)
        if has_copies(setting):
            row_bytes = n * dtype.itemsize
            landing = self.shard * group.world_size * row_bytes
            self.copies = PeerCopies(group, setting.device, landing, self.pieces(row_bytes), rounds=2)

    def communicate(self, turn: int) -> torch.Tensor:
        dist.all_reduce(self._alone, group=self.setting.group.process_group)
        return self._alone

    def sequential(self, turn: int) -> torch.Tensor:
        self.multiply(_of(self.lefts, turn), turn, self._partial)
        dist.all_reduce(self._partial, group=self.setting.group.process_group)
        return self._partial

    def torch_one_shot(self, turn: int) -> torch.Tensor:
        self.multiply(_of(self.lefts, turn), turn, self._symmetric)
        name = self.setting.group.name
        result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(self._symmetric, "sum", name)
        return result

    def torch_two_shot(self, turn: int) -> torch.Tensor:
        self.multiply(_of(self.lefts, turn), turn, self._symmetric)
        name = self.setting.group.name
        result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(self._symmetric, "sum", name)
        return result


SIDES: dict[str, Callable[[int, int, int, Setting], Side]] = {
    "all_gather_matmul": AllGatherMatmul,
    "matmul_reduce_scatter": MatmulReduceScatter,
    "matmul_all_reduce": MatmulAllReduce,
}


def side(operator: str, m: int, n: int, k: int, setting: Setting) -> Side:
    """One operator on one global matmul. Collective. Raises InputError for an operator without baselines."""
    if operator not in SIDES:
        raise InputError(f"bench {operator}", "there is no such operator", f"Choose one of {', '.join(SIDES)}")
    return SIDES[operator](m, n, k, setting)


def has_copies(setting: Setting) -> bool:
    """Whether the copy engine can be measured."""
    return setting.device.type == "cuda" and HAS_COPY_ENGINE


def _of(sets: list[torch.Tensor], turn: int) -> torch.Tensor:
    return sets[turn % len(sets)]


def _own_seeds(sets: int, setting: Setting, beyond: int = 0) -> range:
    first = 1000 * (setting.group.rank + 1) + beyond
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

"""Calls of torch's fused symmetric-memory operators as data, and torch's plain answers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from overweave.compat.torch_names import all_gather_single
from overweave.memory.group import process_group_of

FP8 = torch.float8_e4m3fn
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"


class _PlainGathers(TorchDispatchMode):
    """Gathers by the plain collective: gloo's functional one ends a process whose tensors are on a GPU (torch 2.11).

    Gathers of fp8 tensors gather bytes: gloo knows no fp8.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops._c10d_functional.all_gather_into_tensor.default:
            return func(*args, **(kwargs or {}))
        own, ranks, group = args
        sent = own.view(torch.uint8) if own.dtype == FP8 else own
        every = sent.new_empty((ranks * sent.shape[0], *sent.shape[1:]))
        all_gather_single(every, sent.contiguous(), group=process_group_of(group))
        return every.view(own.dtype)


class Fused(NamedTuple):
    """One call. shape: of the own operand, whose dimension `dim` is gathered, or scattered. columns: of each weight."""

    name: str
    shape: tuple[int, ...]
    dim: int
    columns: tuple[int, ...] = (16,)
    dtype: torch.dtype = torch.float32
    option: str = ""
    is_transposed: bool = False
    is_strided: bool = False

    def arguments(self, seed: int = 0, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands of small integers, so that every sum is exact: shards differ between ranks, weights do not."""
        moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(device), self._arguments(seed)
        )
        return moved

    def _arguments(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        group, rank = process_group_of(None).group_name, dist.get_rank()
        own, common = torch.Generator().manual_seed(100 * seed + rank), torch.Generator().manual_seed(seed)
        a = _integers(self.shape, own, self.dtype)
        if self.is_strided:
            a = _integers((*self.shape[:-1], 2 * self.shape[-1]), own, self.dtype)[..., ::2]
        bs = [self._weight(cols, own if self.name in (SCATTER, SCALED_SCATTER) else common) for cols in self.columns]
        if self.name == GATHER:
            return (a, bs, self.dim, group), {"return_A": self.option != "products"}
        if self.name == SCATTER:
            return (a, bs[0], self.option or "sum", self.dim, group), {}
        return self._scaled(a, bs, group)

    def _weight(self, columns: int, generator: torch.Generator) -> torch.Tensor:
        k = self.shape[-1]
        if self.name == GATHER and self.dim == len(self.shape) - 1:
            k *= dist.get_world_size()
        if self.is_transposed or self.dtype == FP8:
            return _integers((columns, k), generator, self.dtype).t()
        return _integers((k, columns), generator, self.dtype)

    def _scaled(self, a: torch.Tensor, bs: list[torch.Tensor], group: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        powers = torch.tensor([0.5, 1.0, 2.0])
        by_rows = self.option in ("rows", "all rows")
        whole = list(a.shape[:-1])
        if self.option == "all rows":
            whole[self.dim] *= dist.get_world_size()
        numbers = torch.arange(torch.Size(whole).numel()) % 3
        scale_a = powers[numbers].reshape(*whole, 1) if by_rows else torch.tensor(0.5)
        scales = [powers[torch.arange(b.shape[1]) % 3].reshape(1, -1) if by_rows else torch.tensor(2.0) for b in bs]
        out = torch.bfloat16
        if self.name == SCALED_GATHER:
            biases = [torch.arange(b.shape[1]).to(out) if self.option == "bias" else None for b in bs]
            none, fast = [None] * len(bs), [False] * len(bs)
            return (a, bs, scale_a, scales, self.dim, group, biases, none, [out] * len(bs), fast), {}
        shape = [*a.shape[:-1], bs[0].shape[1]]
        return (a, bs[0], scale_a, scales[0], "sum", self.dim, self.dim, group, shape), {"out_dtype": out}

    def answered(self, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
        """By whoever answers the operator."""
        arguments, options = self.arguments(seed, device)
        return _tensors(getattr(torch.ops.symm_mem, self.name)(*arguments, **options))

    def plain(self, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
        """By torch's fallback."""
        arguments, options = self.arguments(seed, device)
        fallback: Callable[..., Any] = getattr(torch_symm_mem, f"_{self.name}_fallback")
        with _PlainGathers():  # type: ignore[no-untyped-call]
            return _tensors(fallback(*arguments, **options))


def fused_calls(world_size: int) -> Iterator[Fused]:
    """Every operator, dimension, layout and option, with dimensions of size 1, too."""
    lead, w = (4 * world_size, 32), world_size
    for shape, dim in ((lead, 0), ((2, 2 * w, 32), 1), ((1, 2 * w, 32), 1), ((2 * w, 3, 32), 0), ((2, 1, w, 16), 2)):
        for name in (GATHER, SCATTER):
            yield from (Fused(name, shape, dim, is_transposed=way) for way in (False, True))
            yield from (Fused(name, shape, dim, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
        yield Fused(GATHER, shape, dim, (16, 8, 24))
        yield Fused(GATHER, shape, dim, option="products", is_strided=True)
        yield Fused(SCATTER, shape, dim, is_strided=True)
        yield Fused(SCATTER, shape, dim, option="avg")
        yield from (Fused(SCALED_GATHER, shape, dim, dtype=FP8, option=way) for way in ("", "rows", "bias", "all rows"))
        yield Fused(SCALED_GATHER, shape, dim, (16, 32), FP8)
    yield from (Fused(SCALED_SCATTER, lead, 0, dtype=FP8, option=way) for way in ("", "rows"))
    yield from (Fused(SCALED_SCATTER, (2, 2 * w, 32), 1, dtype=FP8, option=way) for way in ("", "rows"))
    yield Fused(GATHER, (1, 1, 16), 1, (1,))
    yield Fused(GATHER, (1, 16), 0, (1,))
    yield Fused(SCATTER, (1, w, 16), 1, (1,))
    yield Fused(SCATTER, (1, w, 1), 1, (1,))


def taken_by_torch(world_size: int) -> Iterator[tuple[Fused, str]]:
    """Calls that overweave leaves to torch, each with a word of the reason."""
    rows = (2, 2 * world_size, 16)
    yield Fused(GATHER, rows, 2, (16,)), "last dimension"
    yield Fused(SCATTER, rows, 2, (2 * world_size,)), "last dimension"
    yield Fused(GATHER, rows, 1, dtype=torch.float64), "float64"
    yield Fused(SCATTER, rows, 1, dtype=torch.float64), "float64"


def difference(call: Fused, seed: int = 0, device: str = "cpu") -> str:
    """In what an answer differs from torch's plain one: values bit for bit, dtypes, strides; empty if in nothing."""
    ours = call.answered(seed, device)
    try:
        torchs = call.plain(seed, device)
    except RuntimeError:
        if call.dtype != FP8:
            raise
        return ""  # a torch whose scaled matmul has no such scales on this device has no answer to hold ours against
    if len(ours) != len(torchs):
        return f"{call}: {len(ours)} results, not {len(torchs)}"
    for got, wanted in zip(ours, torchs, strict=True):
        told = [(tuple(each.shape), each.stride(), each.dtype) for each in (got, wanted)]
        if told[0] != told[1]:
            return f"{call}: {told[0]}, not {told[1]}"
        if not torch.equal(got.double(), wanted.double()):
            return f"{call}: other values"
    return ""


def _integers(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _tensors(results: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]

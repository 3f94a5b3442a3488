"""One kernel in one configuration, as it is compiled and linted, and what the lists of them share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from overweave.ir.dtype import Dtype
from overweave.kernels.arguments import LaunchTiles, SignalWords
from overweave.lang.arguments import Channel, SymmetricLayout, SymmetricTensor, folded
from overweave.lang.mapping import TileChannel
from overweave.memory.split_k import Shares
from overweave.runtime.kernel_calls.call import KernelCall, TileKernelArgs
from tools.aot import Source, source_of_launch
from tools.ptx_lint.contract import Contract, Guard

SOME = 1001  # a number of which nothing is known
ADDRESSES = torch.empty(16, dtype=torch.int64)
_INTS = torch.empty(64, dtype=torch.int32)
# What every kernel that waits is given, and every kernel that takes tiles from a table.
PROTOCOL = SignalWords(_INTS, _INTS, ADDRESSES, 4)
WORDS: Any = SimpleNamespace(
    group=SimpleNamespace(rank=3, world_size=4),
    words=SimpleNamespace(addresses=(1, 2, 3, 4)),  # all ranks in reach
    state=ADDRESSES,
    claims=_INTS,
    limits=ADDRESSES,
    device=_INTS.device,
)


def tiles_of(traced: bool) -> TileKernelArgs:
    """What a kernel is given of a plan."""
    return TileKernelArgs(LaunchTiles(_INTS, _INTS, ADDRESSES, 7), PROTOCOL, traced)


DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
OPERANDS = (2, 4, 8)


class Case(NamedTuple):
    """A kernel in one configuration. The configuration's name is `source.config`."""

    source: Source
    contract: Contract


class Variant(NamedTuple):
    """What a matmul is specialised for beside its tile shape.

    two_sources: own rows are read in place; otherwise all rows come from where peers write.
    ragged: neither `n` nor `k` is a multiple of 16.
    """

    is_transposed: bool = False
    two_sources: bool = True
    traced: bool = False
    ragged: bool = False

    def __str__(self) -> str:
        words = {"b^T": self.is_transposed, "two sources": self.two_sources, "traced": self.traced}
        return " ".join(word for word, holds in (words | {"ragged": self.ragged}).items() if holds)


PLAIN = Variant()
VARIANTS = tuple(Variant(*bits) for bits in product((False, True), (False, True)))
RARE_VARIANTS = (Variant(is_transposed=True, traced=True), Variant(is_transposed=True, ragged=True))
SUM = Variant(two_sources=False)
SCALED = Variant(is_transposed=True)


def case_of(call: KernelCall, label: str, **promises: Any) -> Case:
    """A launch, as it is compiled, which sees no more of tensors than dtype and alignment, and of numbers whether they
    are 1 or multiples of 16; with what its tuples of arguments (kernels/arguments.py) promise, and what it does beside.
    """
    source = source_of_launch(call.kernel, call.arguments, call.options, label)
    known: dict[str, Any] = {}
    for name, kind in source.signature.items():
        if isinstance(kind, SignalWords):
            known["alarm"] = f"{name}.words", f"*{name}.limits"
        elif isinstance(kind, LaunchTiles):
            known["claims"] = (f"{name}.claims",)
        elif isinstance(kind, Shares):  # of blocks of one device
            known["private"] = (f"{name}.arrivals",)
            known["counted"] = (Guard(f"{name}.arrivals", (f"{name}.partials",)),)
    return Case(source, Contract(**known | promises))


PROGRAM_LAUNCH = {"num_warps": 8, "num_stages": 3}


def channel_kind(layout: TileChannel, rank: Any, consumer_table: str | None = None) -> Channel:
    """A channel as a kernel's argument."""
    return Channel("*i32", "*i64", "*i32", "*i64", None, consumer_table, None, rank, "i32", folded(layout))


def tensor_kind(stride: int, is_shard: bool = False, kind: str = "*bf16") -> SymmetricTensor:
    """A symmetric tensor as a kernel's argument."""
    return SymmetricTensor(kind, "*i64", folded(SymmetricLayout(stride, is_shard)))


def alarm_of(*channels: str) -> tuple[str, ...]:
    """The memory of abort words and reports that channels name."""
    return tuple(name for channel in channels for name in (f"{channel}.words", f"*{channel}.limits"))


def source_of_kinds(
    kernel: Any,
    signature: Mapping[str, Any],
    constants: Mapping[str, Any],
    ranks: int,
    divisible: tuple[str, ...] = (),
    launch: Mapping[str, int] = PROGRAM_LAUNCH,
) -> Source:
    """A kernel of tile primitives, given the types of its arguments. divisible: numbers that are multiples of 16."""
    aligned = [name for name, kind in signature.items() if isinstance(kind, str) and kind.startswith("*")]
    for name, kind in signature.items():
        if not isinstance(kind, str):
            pairs = zip(kind._fields, kind, strict=True)
            aligned += [f"{name}.{field}" for field, one in pairs if isinstance(one, str) and one.startswith("*")]
    rank = next(kind.rank for kind in signature.values() if isinstance(kind, Channel))
    label = f"{ranks} ranks, rank {rank if rank == 1 else 'any'}"
    return Source(kernel, signature, constants, dict.fromkeys((*aligned, *divisible), 16), launch, label)

"""One kernel in one configuration, as it is compiled and linted, and what the lists of them share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from overweave.compiler.aot import Source
from overweave.compiler.ptx_lint.contract import Contract, Guard
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.plan import MatmulConfig
from overweave.schedules.tiles.shape import TileShape

DTYPES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DTYPES_OF_OPERANDS = DTYPES | {FLOAT8: "fp8e4nv"}
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
SHARES = Guard("arrivals", ("partials",))  # along k, of blocks of one device
SCALED = Variant(is_transposed=True)


def dealt(shape: TileShape) -> MatmulConfig:
    """A tile shape whose kernel knows shares. How many is no matter to it."""
    return replace(shape.config, split_tiles=1, split_k=2)


def source_of(
    kernel: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[str, Any],
    options: Mapping[str, int],
    label: str,
    divisible: tuple[str, ...] = (),
) -> Source:
    """What is to be compiled. divisible: numbers that are multiples of 16, as all addresses are."""
    parts = (part for name, kind in signature.items() for part in _parts(name, kind))
    aligned = (name for name, kind in parts if str(kind).startswith("*"))
    return Source(kernel, signature, constexprs, dict.fromkeys((*aligned, *divisible), 16), options, label)


def _parts(name: str, kind: Any) -> list[tuple[str, Any]]:
    """An argument, or those of a tuple, by name."""
    if isinstance(kind, str):
        return [(name, kind)]
    return [(f"{name}.{field}", part) for field, part in kind._asdict().items()]

"""One kernel in one configuration, as it is compiled and linted, and what the lists of them share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace
from triton.experimental.gluon import language as gl

from overweave.compiler.aot import Source
from overweave.compiler.ptx_lint.contract import Contract, Guard
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.plan import MatmulConfig
from overweave.schedules.tiles.shape import TileShape

DTYPES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DTYPES_OF_OPERANDS = DTYPES | {FLOAT8: "fp8e4nv"}
GLUON_DTYPES = {"bfloat16": gl.bfloat16, "float16": gl.float16, FLOAT8: gl.float8e4nv}
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

    @property
    def constexprs(self) -> dict[str, bool]:
        return {"B_IS_TRANSPOSED": self.is_transposed, "TWO_SOURCES": self.two_sources, "TRACED": self.traced}


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
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, int],
    label: str,
    divisible: tuple[str, ...] = (),
) -> Source:
    """What is to be compiled. divisible: numbers that are multiples of 16, as all addresses are."""
    aligned = (name for name, kind in signature.items() if kind.startswith("*"))
    return Source(kernel, signature, constexprs, dict.fromkeys((*aligned, *divisible), 16), options, label)


def descriptor_type(dtype: Dtype, block: tuple[int, int], is_gluon: bool) -> str:
    """A tensor map of 16- or 8-bit numbers with such a block, as a kernel's signature names it."""
    shape = f"{DTYPES_OF_OPERANDS[dtype]}[{block[0]}, {block[1]}]"
    if not is_gluon:
        return f"tensordesc<{shape}>"
    return f"tensordesc<{shape},{gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])!r}>"

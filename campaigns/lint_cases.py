"""Every kernel of ours with every configuration it is launched in, and what each promises to the lint.

The signatures are what a launch specialises for: pointers aligned to 16 bytes, sizes divisible by 16 or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from overweave.compiler.aot import Source
from overweave.compiler.lint_contract import Contract, Guard
from overweave.ir.plan import Dtype, MatmulConfig, ReduceConfig
from overweave.kernels.matmul import matmul_kernel
from overweave.kernels.matmul_hopper import matmul_hopper_kernel
from overweave.kernels.reduction import reduction_kernel
from overweave.memory.protocol import begin_kernel
from overweave.memory.stamp import stamp_kernel
from overweave.schedules.tile_shape import Kernel, shapes

DTYPES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
GLUON_DTYPES = {"bfloat16": gl.bfloat16, "float16": gl.float16}
TILE_KERNELS: dict[Kernel, tuple[Dtype, ...]] = {"portable": tuple(DTYPES), "hopper": ("bfloat16", "float16")}
OPERANDS = (2, 4, 8)
BEGIN_BLOCK = 128
# What every kernel that waits is given (memory/device.py), and what a kernel that takes tiles from a table is given.
PROTOCOL = {"signals": "*i32", "words": "*i32", "limits": "*i64"}
TABLE = {"table": "*i32", "claims": "*i32", "trace": "*i64", "tiles": "i32", "world_size": "i32", "n": "i32"}


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


def cases() -> Iterator[Case]:
    """All of them."""
    yield begin_case()
    yield stamp_case()
    for dtype, operands, traced in product(DTYPES, OPERANDS, (False, True)):
        yield reduction_case(dtype, operands, traced)
    for kernel, dtypes in TILE_KERNELS.items():
        for dtype in dtypes:
            for shape, variant in product(shapes(dtype, kernel), VARIANTS):
                yield matmul_case(dtype, shape.config, variant)
        for variant in RARE_VARIANTS:
            yield matmul_case("bfloat16", MatmulConfig(kernel=kernel), variant)


def begin_case() -> Case:
    """The head of a call. Two looks: at all credits, and the alarm's.

    Three releases: the credit, and of the alarm its report and the peers' abort words.
    """
    numbers = dict.fromkeys(("slot", "signal_count", "rank", "world_size"), "i32")
    contract = Contract(
        waits=1,
        looks=2,
        releases=3,
        guarded=(Guard("words", ()),),
        announced=(Guard("*limits", ("*state",), optional=True),),
        alarm=("words", "*limits"),
        claims=("claims",),
    )
    signature = {"state": "*i64", "claims": "*i32", **PROTOCOL, **numbers}
    return Case(_source(begin_kernel, signature, {"BLOCK": BEGIN_BLOCK}, {"num_warps": 4}, ""), contract)


def stamp_case() -> Case:
    """The barrier that takes the time, for traces: nothing but words stands behind its signals."""
    contract = Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", ()),),
        announced=(Guard("*addresses", ()),),
        alarm=("words",),
    )
    tables = {"state": "*i64", "addresses": "*i64", "signals": "*i32", "words": "*i32", "limits": "*i64"}
    return Case(
        _source(stamp_kernel, {**tables, "rank": "i32", "world_size": "i32"}, {}, {"num_warps": 4}, ""), contract
    )


def reduction_case(dtype: Dtype, operands: int, traced: bool) -> Case:
    """The ordered reduction. Its operands, and its output too, may lie where a table says."""
    config = ReduceConfig()
    signature = {"operands": "*i64", "out": f"*{DTYPES[dtype]}", **PROTOCOL, **TABLE}
    constexprs = {"OPERANDS": operands, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "TRACED": traced}
    label = f"{dtype} {operands} operands{' traced' if traced else ''}"
    source = _source(reduction_kernel, signature, constexprs, {"num_warps": config.warps}, label)
    return Case(source, _tiles(("*operands",), ("out", "*operands")))


def matmul_case(dtype: Dtype, config: MatmulConfig, variant: Variant) -> Case:
    """The matmul that `config` names. Tensor cores are promised where the dtype has them."""
    is_hopper = config.kernel == "hopper"
    block_m = config.block_m // 2 if is_hopper else config.block_m
    b_block = (config.block_n, config.block_k) if variant.is_transposed else (config.block_k, config.block_n)
    a = _descriptor(dtype, (block_m, config.block_k), is_hopper)
    out = {"out": f"*{DTYPES[dtype]}"}
    if is_hopper:
        out = {"out": _descriptor(dtype, (block_m, config.block_n), True), "out_pointer": f"*{DTYPES[dtype]}"}
    sides = {"a_shard": a, "a_workspace": a, "b": _descriptor(dtype, b_block, is_hopper), **out}
    constant = {"STAGES": config.stages} if is_hopper else {"PRECISION": "ieee" if dtype == "float32" else "tf32"}
    options = {"num_warps": 4} if is_hopper else {"num_warps": config.warps, "num_stages": config.stages}
    source = _source(
        matmul_hopper_kernel if is_hopper else matmul_kernel,
        {**sides, **PROTOCOL, **TABLE, "k": "i32"},
        {**constant, **variant.constexprs},
        options,
        f"{dtype} {config.block_m}x{config.block_n}x{config.block_k} {config.warps}w{config.stages}s {variant}".strip(),
        () if variant.ragged else ("n", "k"),
    )
    guarded = ("a_workspace",) if variant.two_sources else ("a_shard",)
    return Case(source, _tiles(guarded, tuple(out), uses_tensor_cores=dtype != "float32"))


def _tiles(guarded: tuple[str, ...], announced: tuple[str, ...], uses_tensor_cores: bool = False) -> Contract:
    """A kernel that takes tiles from a table, which says what to wait for and what to signal, if anything.

    The one look beside the wait is the alarm's, which reports what the signal says.
    """
    return Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", guarded, optional=True),),
        announced=(Guard("signals", announced, optional=True),),
        alarm=("words", "*limits"),
        claims=("claims",),
        wgmma=uses_tensor_cores,
        depth=1 if uses_tensor_cores else 0,
    )


def _descriptor(dtype: Dtype, block: tuple[int, int], is_gluon: bool) -> str:
    shape = f"{DTYPES[dtype]}[{block[0]}, {block[1]}]"
    if not is_gluon:
        return f"tensordesc<{shape}>"
    return f"tensordesc<{shape},{gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])!r}>"


def _source(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, int],
    label: str,
    divisible: tuple[str, ...] = (),
) -> Source:
    aligned = (name for name, kind in signature.items() if kind.startswith("*"))
    return Source(kernel, signature, constexprs, dict.fromkeys((*aligned, *divisible), 16), options, label)

"""Every kernel of ours with every configuration it is launched in, and what each promises to the lint.

A case is `(label, Source, Contract)`. The signature is what a launch would specialise for: pointers aligned to 16 bytes,
sizes divisible by 16 or not; tensors of one row or a size of 1 make no other code.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from overweave.compiler.aot import Source
from overweave.compiler.lint_contract import Contract, Guard
from overweave.ir.plan import Dtype, MatmulConfig, ReduceConfig
from overweave.kernels.matmul import matmul_kernel
from overweave.kernels.reduction import reduction_kernel
from overweave.memory.protocol import begin_kernel
from overweave.runtime.kernels import BEGIN_BLOCK, PRECISION, matmul_options, reduction_options
from overweave.schedules.tile_shape import shapes

DTYPES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OPERANDS = (2, 4, 8)
# What every kernel that waits is given (memory/device.py). Its alarm looks at the signal once more, to report it.
PROTOCOL = {"signals": "*i32", "words": "*i32", "limits": "*i64"}
TABLE = {"table": "*i32", "claims": "*i32", "trace": "*i64", "tiles": "i32", "world_size": "i32"}
POINTERS = ("out", "operands", "state", "table", "claims", "signals", "words", "limits", "trace")
ALARM = ("words", "*limits")


class Case(NamedTuple):
    """A kernel in one configuration."""

    label: str
    source: Source
    contract: Contract


def cases() -> Iterator[Case]:
    """All of them: begin, then reductions, then matmuls."""
    yield begin_case()
    for (dtype, operands), traced in product(product(DTYPES, OPERANDS), (False, True)):
        yield reduction_case(dtype, operands, traced)
    for dtype in DTYPES:
        for shape, is_transposed, two_sources in product(shapes(dtype), (False, True), (False, True)):
            yield matmul_case(dtype, shape.config, is_transposed, two_sources)
    yield matmul_case("bfloat16", MatmulConfig(), True, True, traced=True)
    yield matmul_case("bfloat16", MatmulConfig(), True, True, divisible=False)


def begin_case() -> Case:
    """The head of a call. Releases: the credit, and of the alarm the report and the peers' abort words."""
    numbers = dict.fromkeys(("slot", "signal_count", "rank", "world_size"), "i32")
    signature = {"state": "*i64", "claims": "*i32", **PROTOCOL, **numbers}
    contract = Contract(
        waits=1,
        looks=1,
        releases=3,
        guarded=(Guard("words", ()),),
        announced=(Guard("*limits", ("*state",), optional=True),),
        alarm=ALARM,
        claims=("claims",),
    )
    return _case(begin_kernel, signature, {"BLOCK": BEGIN_BLOCK}, {"num_warps": 4}, "", contract)


def reduction_case(dtype: Dtype, operands: int, traced: bool) -> Case:
    """Adds what arrived; its operands and its output lie where a table says."""
    config = ReduceConfig()
    signature = {"operands": "*i64", "out": f"*{DTYPES[dtype]}", **PROTOCOL, **TABLE, "n": "i32"}
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    contract = _tiles(("*operands",), ("out", "*operands"))
    label = f"{dtype} {operands} operands{' traced' if traced else ''}"
    constexprs = {"OPERANDS": operands, "TRACED": traced, **blocks}
    return _case(reduction_kernel, signature, constexprs, reduction_options(config), label, contract)


def matmul_case(
    dtype: Dtype,
    config: MatmulConfig,
    is_transposed: bool,
    two_sources: bool,
    traced: bool = False,
    divisible: bool = True,
) -> Case:
    """two_sources: own rows are read in place; otherwise all rows come from where peers write."""
    a_block = f"tensordesc<{DTYPES[dtype]}[{config.block_m},{config.block_k}]>"
    b_shape = (config.block_n, config.block_k) if is_transposed else (config.block_k, config.block_n)
    b_block = f"tensordesc<{DTYPES[dtype]}[{b_shape[0]},{b_shape[1]}]>"
    sides = {"a_shard": a_block, "a_workspace": a_block, "b": b_block, "out": f"*{DTYPES[dtype]}"}
    constexprs = {"B_IS_TRANSPOSED": is_transposed, "TWO_SOURCES": two_sources, "TRACED": traced}
    uses_tensor_cores = dtype != "float32"
    contract = _tiles(("a_workspace",) if two_sources else ("a_shard",), ("out",), uses_tensor_cores)
    traits = {"b^T": is_transposed, "two sources": two_sources, "traced": traced, "ragged": not divisible}
    words = [dtype, f"{config.block_m}x{config.block_n}x{config.block_k}", f"{config.warps}w{config.stages}s"]
    return _case(
        matmul_kernel,
        {**sides, **PROTOCOL, **TABLE, "n": "i32", "k": "i32"},
        {"PRECISION": PRECISION[dtype], **constexprs},
        matmul_options(config),
        " ".join((*words, *(word for word, holds in traits.items() if holds))),
        contract,
        ("n", "k") if divisible else (),
    )


def _tiles(guarded: tuple[str, ...], announced: tuple[str, ...], uses_tensor_cores: bool = False) -> Contract:
    """A kernel that takes tiles from a table, where the table says which wait and which signal."""
    return Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", guarded, optional=True),),
        announced=(Guard("signals", announced, optional=True),),
        alarm=ALARM,
        claims=("claims",),
        wgmma=uses_tensor_cores,
        depth=1 if uses_tensor_cores else 0,
    )


def _case(
    kernel: object,
    signature: dict[str, str],
    constexprs: dict[str, int | bool | str],
    options: dict[str, int],
    label: str,
    contract: Contract,
    divisible: tuple[str, ...] = (),
) -> Case:
    attrs = dict.fromkeys((*(name for name in POINTERS if name in signature), *divisible), 16)
    return Case(label, Source(kernel, signature, constexprs, attrs, options, label), contract)

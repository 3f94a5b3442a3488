"""The kernels of packed messages in every configuration, with what each promises to the lint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from msgspec.structs import replace

from campaigns.lint.lint_case import DTYPES, DTYPES_OF_OPERANDS, OPERANDS, Case, source_of
from overweave.compiler.ptx_lint.contract import Contract, Packed
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, NORM_WEIGHT, RESIDUAL, Epilogue, Z
from overweave.ir.plan import PACKED_SUMS, Exchange, PackedConfig
from overweave.kernels.arguments import AfterSums
from overweave.runtime.gpu.kernels.kernels import PACKED_KERNELS
from overweave.runtime.gpu.kernels.packed_call import packed_constants
from overweave.schedules.tiles.shape import PACKED, PACKED_ROWS

SUMMING: tuple[Exchange, ...] = (*PACKED_SUMS, "scatter")
FINISHED = Epilogue(bias=True, activation="silu", residual=True)


def packed_cases() -> Iterator[Case]:
    """Every exchange for every dtype and number of ranks, and every launch; rows that are normed alike."""
    for dtype, ranks, exchange in product(DTYPES, OPERANDS, PACKED_KERNELS):
        yield packed_case(dtype, ranks, replace(PACKED[0], exchange=exchange))
    for launch, exchange in product(PACKED[1:], PACKED_KERNELS):
        yield packed_case("bfloat16", 4, replace(launch, exchange=exchange))
    for launch, exchange in product(PACKED_ROWS, PACKED_SUMS):
        for ranks in OPERANDS:
            yield packed_case("bfloat16", ranks, replace(launch, exchange=exchange), normed=True)
        yield packed_case("float16", 2, replace(launch, exchange=exchange), normed=True)
        yield packed_case("float32", 2, replace(launch, exchange=exchange), normed=True)
    yield packed_case(FLOAT8, 4, replace(PACKED[0], exchange="gather"))
    for launch, exchange, ranks in product(PACKED, SUMMING, (2, 8)):
        yield packed_case("bfloat16", ranks, replace(launch, exchange=exchange), epilogue=FINISHED)
    for dtype, exchange in product(DTYPES, SUMMING):
        yield packed_case(dtype, 4, replace(PACKED[0], exchange=exchange), epilogue=FINISHED)
    for exchange in PACKED_KERNELS:
        yield packed_case("bfloat16", 4, replace(PACKED[0], exchange=exchange), chained=True)


def packed_case(
    dtype: Dtype,
    ranks: int,
    config: PackedConfig = PACKED[0],
    normed: bool = False,
    epilogue: Epilogue = NO_EPILOGUE,
    chained: bool = False,
) -> Case:
    """An exchange of packed messages: no signals, and of releases and acquires none but the alarm's.

    normed: programs have whole rows, in several turns, and norm them. epilogue: of sums. chained: of it and the matmul,
    the later starts early.
    """
    numbers = dict.fromkeys(("count", "shard", "span", "stride", "half", "rank", "world_size"), "i32")
    sides = ("x", "gathered") if config.exchange == "gather" else ("partial", "out")
    arrays: dict[str, Any] = dict.fromkeys(sides, f"*{DTYPES_OF_OPERANDS[dtype]}")
    tables = {"spaces": "*i64", "state": "*i64", "words": "*i32", "limits": "*i64"}
    constexprs = dict(zip(("SENDERS", "POLL", "HELD"), packed_constants(ranks), strict=True))
    constexprs |= {"BLOCK": config.block, "CHAINED": chained}
    if config.exchange in SUMMING:
        read = (RESIDUAL, NORM_WEIGHT, Z) if normed else epilogue.inputs
        arrays["after"] = AfterSums(**dict.fromkeys(read, f"*{DTYPES_OF_OPERANDS[dtype]}"))
        constexprs |= {"EPILOGUE": epilogue.bits}
        constexprs |= {"EPS": 1e-5} if config.exchange in PACKED_SUMS else {}
        numbers["n"] = "i32"
    numbers |= {"turns": "i32"} if normed else {}
    constexprs |= {} if normed else {"turns": 1}
    label = f"{dtype} {ranks} ranks{'' if config.block == PACKED[0].block else f' {config.block}'}"
    source = source_of(
        PACKED_KERNELS[config.exchange],
        {**arrays, **tables, **numbers},
        constexprs,
        {"num_warps": config.warps},
        label + " norm" * normed + f" {epilogue}" * bool(epilogue.bits) + " chained" * chained,
    )
    messages = Packed(("*spaces",), pushes=config.shots * (ranks - 1), looks=config.shots * (ranks - 1))
    return Case(source, Contract(packed=messages, alarm=("words", "*limits"), private=("state",)))

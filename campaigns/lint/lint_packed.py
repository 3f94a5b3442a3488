"""The kernels of packed messages in every configuration, with what each promises to the lint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import torch
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from campaigns.lint.lint_case import DTYPES, OPERANDS, PROTOCOL, SOME, WORDS, Case, case_of
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Applied, Epilogue, Norm
from overweave.ir.operators.forms import Z
from overweave.ir.plan import PACKED_SUMS, PackedConfig, PackedExchange
from overweave.ir.problem import Problem
from overweave.memory.layout import PackedLayout
from overweave.runtime.kernel_calls.packed import Caller, packed_call
from overweave.schedules.tiles.shape import PACKED, PACKED_ROWS
from tools.ptx_lint.contract import Packed

EXCHANGES: tuple[PackedExchange, ...] = get_args(PackedExchange)
SPACE: Any = SimpleNamespace(half_bytes=1001, spaces=WORDS.limits, state=WORDS.state)
MANY = 3003  # words of a row that programs go over in several turns
FINISHED = Epilogue(bias=True, activation="silu", residual=True)


def packed_cases() -> Iterator[Case]:
    """Every exchange for every dtype and number of ranks, and every launch; rows that are normed alike."""
    for dtype, ranks, exchange in product(DTYPES, OPERANDS, EXCHANGES):
        yield packed_case(dtype, ranks, replace(PACKED[0], exchange=exchange))
    for launch, exchange in product(PACKED[1:], EXCHANGES):
        yield packed_case("bfloat16", 4, replace(launch, exchange=exchange))
    for launch, exchange in product(PACKED_ROWS, PACKED_SUMS):
        for ranks in OPERANDS:
            yield packed_case("bfloat16", ranks, replace(launch, exchange=exchange), normed=True)
        yield packed_case("float16", 2, replace(launch, exchange=exchange), normed=True)
        yield packed_case("float32", 2, replace(launch, exchange=exchange), normed=True)
    yield packed_case(FLOAT8, 4, replace(PACKED[0], exchange="gather"))
    for launch, exchange, ranks in product(PACKED, PACKED_SUMS, (2, 8)):
        yield packed_case("bfloat16", ranks, replace(launch, exchange=exchange), epilogue=FINISHED)
    for dtype, exchange in product(DTYPES, PACKED_SUMS):
        yield packed_case(dtype, 4, replace(PACKED[0], exchange=exchange), epilogue=FINISHED)
    for exchange in EXCHANGES:
        yield packed_case("bfloat16", 4, replace(PACKED[0], exchange=exchange), chained=True)


def packed_case(
    dtype: Dtype,
    ranks: int,
    config: PackedConfig = PACKED[0],
    normed: bool = False,
    rows: Applied | UnsetType = UNSET,
    epilogue: Epilogue = NO_EPILOGUE,
    chained: bool = False,
) -> Case:
    """An exchange of packed messages: no signals, and of releases and acquires none but the alarm's.

    normed, rows: programs have whole rows, in several turns, and norm or finish them. epilogue: of sums. chained: of it
    and the matmul, the later starts early.
    """
    operator = "all_gather_matmul" if config.exchange == "gather" else "matmul_all_reduce"
    norm = Norm(eps=1e-5, residual=True) if normed else None
    problem = Problem(
        operator=operator, m=SOME, n=SOME, k=64, world_size=ranks, dtype=dtype, epilogue=epilogue, norm=norm, rows=rows
    )
    names = ("source", "out", "y", *((*norm.inputs, Z) if norm else epilogue.inputs), *(rows.inputs if rows else ()))
    tensors = dict.fromkeys(names, torch.empty(16, dtype=getattr(torch, dtype)))
    made = {name: getattr(torch, problem.operand(name, 0)[2]) for name in problem.also_made}
    tensors |= {name: torch.empty(16, dtype=kept) for name, kept in made.items()}
    layout = PackedLayout(SOME, SOME, "source", "out", SOME, SOME, row_words=MANY if problem.of_rows else 0)
    caller = Caller(SOME, (PROTOCOL.words, PROTOCOL.limits), chained, chained)
    call = packed_call(config, problem, layout, tensors, SPACE, caller)
    label = f"{config.exchange} {dtype} {ranks} ranks{'' if config.block == PACKED[0].block else f' {config.block}'}"
    label += " norm" * normed + f" {rows}" * bool(rows) + f" {epilogue}" * bool(epilogue.steps) + " chained" * chained
    messages = Packed(("*space.spaces",), pushes=config.shots * (ranks - 1), looks=config.shots * (ranks - 1))
    return case_of(call, label, packed=messages, private=("space.state",))

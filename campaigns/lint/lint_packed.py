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
from overweave.ir.plan import PACKED_SUMS, PackedConfig, PackedExchange, SkinnyConfig
from overweave.ir.problem import Problem
from overweave.memory.layout import PackedLayout
from overweave.memory.split_k import SharedShares
from overweave.runtime.kernel_calls import call as calls
from overweave.runtime.kernel_calls.packed import Caller, ChainPosition, SkinnyOperands, packed_call, skinny_call
from overweave.schedules.tiles.shape import PACKED, PACKED_ROWS, SHAPES
from tools.ptx_lint.contract import Guard, Packed

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


# The kernels of the protocol itself, with what each promises: the head of a call, the barrier of traces.


def begin_case() -> Case:
    """The head of a call. Two looks: at all credits, and the alarm's.

    Three releases: the credit, and of the alarm its report and the peers' abort words.
    """
    return case_of(
        calls.prologue_call(WORDS, PROTOCOL, SOME),
        "",
        waits=1,
        looks=2,
        releases=3,
        guarded=(Guard("words", ()),),
        announced=(Guard("*limits", ("*state",), optional=True),),
        alarm=("words", "*limits"),
        claims=("claims",),
    )


def tell_case() -> Case:
    """What a library call tells its peers: behind its kernels, which a boundary ends, and nothing of its own."""
    call = calls.notify_call((0,) * 4, WORDS.device)
    return case_of(call, "", releases=1, announced=(Guard("*words", ()),))


def wait_case() -> Case:
    """A wait in front of what reads the data. Two looks: for who is late, and the alarm's."""
    call = calls.wait_call(PROTOCOL, (SOME,) * 5, SOME, SOME)
    return case_of(call, "", waits=1, looks=2, guarded=(Guard("signals", ()),), alarm=("words", "*limits"))


def stamp_case() -> Case:
    """The barrier that takes the time, for traces: nothing but words stands behind its signals."""
    words = [WORDS.state, WORDS.limits, *PROTOCOL[:3]]
    return case_of(
        calls.stamp_call(words, WORDS.group.rank, WORDS.group.world_size),
        "",
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", ()),),
        announced=(Guard("*addresses", ()),),
        alarm=("words",),
    )


# The matmul of few rows in every configuration, with what it promises to the lint.


def skinny_cases() -> Iterator[Case]:
    """Every shape in both layouts of the weight, alone and in shares, in turn and early."""
    for shape in SHAPES:
        for is_transposed in (False, True):
            yield skinny_case("bfloat16", shape, is_transposed)
            yield skinny_case("bfloat16", replace(shape, splits=3), is_transposed, "leads")
            yield skinny_case("bfloat16", replace(shape, splits=3), is_transposed, "follows")
    yield skinny_case("float16", SHAPES[0], True)
    yield skinny_case("bfloat16", SHAPES[0], True, is_ragged=True)


def skinny_case(
    dtype: Dtype, config: SkinnyConfig, is_transposed: bool, turn: ChainPosition = "in_turn", is_ragged: bool = False
) -> Case:
    """No signals and no waits for programs: a counter that only this device's programs touch. is_ragged: no number is a
    multiple of 16."""
    m, n, k = (5, 1001, 1003) if is_ragged else (5, 1024, 2048)
    a, out = (torch.empty(m, size, dtype=getattr(torch, dtype)) for size in (k, n))
    b = a.new_empty(n, k).t() if is_transposed else a.new_empty(k, n)
    words = {"b^T": is_transposed, "shares": config.splits > 1, turn: turn != "in_turn", "ragged": is_ragged}
    label = " ".join([f"{dtype} {config.block_m} rows", *(word for word, holds in words.items() if holds)])
    return case_of(skinny_call(config, SkinnyOperands(a, b, out), SharedShares(a.device), turn), label, wgmma=True)

"""Compiled kernels on CPU ranks, against plain torch.

Run by test_authored.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from examples.kernels import attention, batched, gate_up, matmul, norm, persistent  # noqa: E402
from overweave.compiler.emit.fuse import kernel_of  # noqa: E402
from overweave.compiler.frontend.source.kernel import AnnotatedKernel  # noqa: E402
from overweave.errors import InputError, PeerError  # noqa: E402
from overweave.memory.group import Group, resolve  # noqa: E402
from overweave.ops.author.arguments import where_of  # noqa: E402
from overweave.ops.author.compile import FusedKernel, compile  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host author")  # here, once, and not in every rank
try_in_copies()

WORLDS = (2, 3, 4)
PUSH, PULL = "all_gather.push pieces=2", "all_gather.pull order=all_peers"
GATHERS = (PUSH, PULL, "all_gather.collective")
BY_KERNEL = "all_gather.push mover=copy_kernel pieces=2"
BY_TILES = ("all_gather.push mover=tiles pieces=2", "all_gather.push mover=bulk_tiles order=all_peers")
IN_BULK = "all_gather.push mover=bulk_kernel"
EVERY = (*GATHERS, BY_KERNEL, IN_BULK, *BY_TILES)  # every back end
SCATTERS = (
    "reduce_scatter.scatter pieces=2",
    "reduce_scatter.ring",
    "reduce_scatter.collective",
    "reduce_scatter.waves",
)
PUSHED = ("reduce_scatter.scatter mover=copy_kernel", "reduce_scatter.scatter mover=bulk_kernel pieces=2")
SPREADS = (
    "spread.push",
    "spread.push pieces=3",
    "spread.collective",
    "spread.push mover=copy_kernel",
    "spread.push mover=bulk_kernel",
    "spread.push mover=tiles pieces=2",
)
CALLS = 2  # the second one finds the memory as the first one left it
Errors = list[float]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of products is exact, whatever its order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).bfloat16()


def shard(whole: torch.Tensor, group: Group) -> torch.Tensor:
    parts = whole.chunk(group.world_size)
    return parts[group.rank].contiguous() if group.rank < len(parts) else whole[:0]


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite if something is NaN."""
    difference = (found.float() - exact.float()).abs()
    return float("inf") if difference.isnan().any() else float(difference.max())


@cache
def read(kernel: object) -> AnnotatedKernel:
    """As `compile` reads it; what is read here, before ranks fork, none of them reads again."""
    return kernel_of(*where_of(kernel))


for each in (
    attention.attention_kernel,
    batched.batched_kernel,
    gate_up.gate_up_kernel,
    matmul.matmul_kernel,
    norm.rms_norm_kernel,
    persistent.persistent_kernel,
):
    read(each)


def calls(kernel: object, schedule: object, one: Callable[[FusedKernel, Group, int], float]) -> Errors:
    group, fused = resolve(None), FusedKernel(read(kernel), schedule)  # type: ignore[arg-type]
    return [one(fused, group, call) for call in range(CALLS)]


def gathered_matmul(schedule: str, m: int) -> Errors:
    n, k = 24, 32

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        a, b, c = integers(m, k, seed=call), integers(k, n, seed=7), torch.full((m, n), torch.nan).bfloat16()
        numbers = (m, n, k, k, 1, n, 1, n, 1)
        fused(shard(a, group), b, c, *numbers, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=4)
        return off(c, (a.float() @ b.float()).bfloat16())

    return calls(matmul.matmul_kernel, schedule, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("schedule", [*EVERY, "all_gather.packed"])
def test_a_gathered_matmul_is_exact(schedule: str, is_whole: bool, world_size: int):
    """Shards of whole tiles are read in place; where neither shards nor the last tile are whole, they are copied."""
    m = 32 * world_size if is_whole else 52
    assert run_ranks(gathered_matmul, world_size, schedule, m) == [[0.0] * CALLS] * world_size


def scattered_matmul(schedule: str | dict[str, str], m: int, with_gather: bool) -> Errors:
    n, k = 24, 16

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        sides = [(integers(m, k, seed=100 * call + r), integers(k, n, seed=50 + r)) for r in range(group.world_size)]
        if with_gather:
            sides = [(sides[0][0], b) for _, b in sides]
        exact = shard(sum(a.float() @ b.float() for a, b in sides), group)  # type: ignore[arg-type]
        a, b = sides[group.rank]
        c = torch.full(exact.shape, torch.nan).bfloat16()
        numbers = (m, n, k, k, 1, n, 1, n, 1)
        a = shard(a, group) if with_gather else a
        fused(a, b, c, *numbers, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=4)
        return off(c, exact.bfloat16())

    return calls(matmul.matmul_kernel, schedule, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "schedule", [*SCATTERS, *PUSHED, "reduce_scatter.packed", "reduce_scatter.scatter mover=tiles pieces=2"]
)
def test_a_scattered_matmul_is_right(schedule: str, world_size: int):
    """Partials and, in the ring, sums under way are rounded to bfloat16: by 1 from 256 on."""
    found = run_ranks(scattered_matmul, world_size, schedule, 32 * world_size, False)
    assert max(error for errors in found for error in errors) <= 2.0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("gather", "scatter"),
    [
        (PUSH, "reduce_scatter.scatter pieces=2"),
        (BY_TILES[0], "reduce_scatter.scatter mover=tiles"),
        (BY_KERNEL, "reduce_scatter.scatter mover=tiles pieces=2"),
        (PUSH, "reduce_scatter.packed"),
    ],
)
def test_both_sides_of_a_matmul(gather: str, scatter: str, world_size: int):
    schedule = {"A": gather, "C": scatter}
    found = run_ranks(scattered_matmul, world_size, schedule, 32 * world_size, True)
    assert max(error for errors in found for error in errors) <= 2.0


def reduced_matmul(schedule: str, rows: int | None = None) -> Errors:
    """Every rank gets all of the sum, and the same bits. rows: two blocks for each rank, unless others are named."""
    n, k = 24, 16

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        m = rows or 32 * group.world_size
        sides = [(integers(m, k, seed=100 * call + r), integers(k, n, seed=50 + r)) for r in range(group.world_size)]
        exact, c = sum(a.float() @ b.float() for a, b in sides), torch.full((m, n), torch.nan).bfloat16()
        numbers = (m, n, k, k, 1, n, 1, n, 1)
        fused(*sides[group.rank], c, *numbers, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=4)
        return off(c, exact)  # type: ignore[arg-type]

    return calls(matmul.matmul_kernel, schedule, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "schedule",
    [
        "all_reduce.two_shot pieces=2",
        "all_reduce.two_shot mover=tiles",
        "all_reduce.collective",
        "all_reduce.waves",
        "all_reduce.one_shot_packed",
        "all_reduce.two_shot_packed",
    ],
)
def test_an_all_reduced_matmul(schedule: str, world_size: int):
    found = run_ranks(reduced_matmul, world_size, schedule)
    assert len({str(errors) for errors in found}) == 1
    assert max(error for errors in found for error in errors) <= 2.0


def exchanged_matmul(schedule: dict[str, str]) -> Errors:
    """all-to-all, matmul, all-to-all: block p of rank s becomes block s of rank p, twice."""
    n, k = 24, 16

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        ranks, rank = range(group.world_size), group.rank
        m = 32 * group.world_size
        sides = [(integers(m, k, seed=10 * call + r), integers(k, n, seed=50 + r)) for r in ranks]
        read = [
            torch.cat([sides[s][0].chunk(len(ranks))[r] for s in ranks]) if "A" in schedule else sides[r][0]
            for r in ranks
        ]
        made = [read[r].float() @ sides[r][1].float() for r in ranks]
        exact = torch.cat([made[s].chunk(len(ranks))[rank] for s in ranks]) if "C" in schedule else made[rank]
        c = torch.full((m, n), torch.nan).bfloat16()
        numbers = (m, n, k, k, 1, n, 1, n, 1)
        fused(*sides[rank], c, *numbers, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=4)
        return off(c, exact.bfloat16())

    return calls(matmul.matmul_kernel, schedule, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("how", [" pieces=2", " mover=tiles", "_collective"])
@pytest.mark.parametrize("tensors", ["A", "C", "AC"])
def test_an_all_to_all_on_either_side(tensors: str, how: str, world_size: int):
    sent = "_waves" if how == "_collective" and tensors == "AC" else how
    both = {"A": f"all_to_all.receive{how}", "C": f"all_to_all.send{sent}"}
    schedule = {tensor: both[tensor] for tensor in tensors}
    assert run_ranks(exchanged_matmul, world_size, schedule) == [[0.0] * CALLS] * world_size


def persistent_matmul(schedule: str, parameter: str, m: int) -> Errors:
    n, k = 32, 32

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        sides = [(integers(m, k, seed=9 * call + r), integers(n, k, seed=50 + r)) for r in range(group.world_size)]
        gathers = parameter == "A"
        a, b = (sides[0][0], sides[1][1]) if gathers else sides[group.rank]
        whole = a.float() @ b.float().t() if gathers else sum(x.float() @ w.float().t() for x, w in sides)
        exact = whole if gathers else shard(whole, group)  # type: ignore[arg-type]
        out = torch.full(exact.shape, torch.nan).bfloat16()  # type: ignore[union-attr]
        a_desc = TensorDescriptor.from_tensor(shard(a, group) if gathers else a, [16, 16])
        b_desc, c_desc = TensorDescriptor.from_tensor(b, [16, 16]), TensorDescriptor.from_tensor(out, [16, 16])
        fused(a_desc, b_desc, c_desc, m, n, k, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=4, NUM_SMS=3)
        return off(out, exact.bfloat16())  # type: ignore[union-attr]

    return calls(persistent.persistent_kernel, {parameter: schedule}, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("schedule", EVERY)
def test_a_gathered_persistent_matmul_is_exact(schedule: str, world_size: int):
    assert run_ranks(persistent_matmul, world_size, schedule, "A", 48) == [[0.0] * CALLS] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("schedule", [*SCATTERS, *PUSHED])
def test_a_scattered_persistent_matmul_is_right(schedule: str, world_size: int):
    found = run_ranks(persistent_matmul, world_size, schedule, "C", 16 * world_size)
    assert max(error for errors in found for error in errors) <= 2.0


def gated(schedule: str) -> Errors:
    m, n, k = 44, 24, 16

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        x, gate, up = integers(m, k, seed=call) / 4, integers(k, n, seed=3) / 4, integers(k, n, seed=4) / 4
        out = torch.full((m, n), torch.nan).bfloat16()
        fused(shard(x, group), gate, up, out, m, n, k, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
        exact = torch.nn.functional.silu(x.float() @ gate.float()) * (x.float() @ up.float())
        return off(out, exact)

    return calls(gate_up.gate_up_kernel, schedule, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("schedule", EVERY)
def test_a_gated_layer(schedule: str, world_size: int):
    found = run_ranks(gated, world_size, schedule)
    assert max(error for errors in found for error in errors) < 0.05


def batches(schedule: str, tensor: str) -> Errors:
    z, m, n, k = 6, 20, 24, 16

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        a, b = integers(z, m, k, seed=call), integers(z, k, n, seed=3)
        c = torch.full((z, m, n), torch.nan).bfloat16()
        sides = {"A": (shard(a, group), b), "B": (a, shard(b, group))}[tensor]
        fused(*sides, c, z, m, n, k, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
        return off(c, torch.bmm(a.float(), b.float()))

    return calls(batched.batched_kernel, {tensor: schedule}, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("schedule", "tensor"),
    [*((how, "A") for how in EVERY), (PULL, "B"), (BY_TILES[1], "B")],
)
def test_a_batched_matmul_is_exact(schedule: str, tensor: str, world_size: int):
    assert run_ranks(batches, world_size, schedule, tensor) == [[0.0] * CALLS] * world_size


def normed(schedule: str) -> Errors:
    rows, cols = 10, 40

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        sides = [
            (integers(rows, cols, seed=10 * call + r), integers(rows, cols, seed=30 + r))
            for r in range(group.world_size)
        ]
        weight, out = integers(cols, seed=3), torch.full((group.world_size * rows, cols), torch.nan).bfloat16()
        fused(*sides[group.rank], weight, out, rows, cols, 1e-5, BLOCK=64)
        whole = torch.cat([x.float() + residual.float() for x, residual in sides])
        exact = whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + 1e-5) * weight.float()
        return off(out, exact)

    return calls(norm.rms_norm_kernel, schedule, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("schedule", SPREADS)
def test_what_a_norm_stores_is_pushed(schedule: str, world_size: int):
    found = run_ranks(normed, world_size, schedule)
    assert max(error for errors in found for error in errors) < 0.05


def attended(schedule: str, is_causal: bool) -> Errors:
    heads, dim, block = 2, 16, 16

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        length = 2 * block * group.world_size
        q, k, v = (integers(length, heads, dim, seed=10 * call + i) / 2 for i in range(3))
        mine, start = shard(q, group), group.rank * 2 * block
        out = torch.full(mine.shape, torch.nan).bfloat16()
        numbers = (len(mine), length, heads, dim, start, dim**-0.5)
        fused(mine, shard(k, group), shard(v, group), out, *numbers, BLOCK_Q=16, BLOCK_S=block, CAUSAL=is_causal)
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(0, 1) for x in (q, k, v)), is_causal=is_causal
        ).transpose(0, 1)
        return off(out, exact[start : start + len(mine)])

    values = PUSH if "_kernel" in schedule else schedule  # one kernel pushes, and it has one source
    return calls(attention.attention_kernel, {"K": schedule, "V": values}, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("schedule", EVERY)
def test_attention_over_gathered_keys_and_values(schedule: str, is_causal: bool, world_size: int):
    found = run_ranks(attended, world_size, schedule, is_causal)
    assert max(error for errors in found for error in errors) < 0.05


NUMBERS = (64, 16, 16, 16, 1, 16, 1, 16, 1)
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 4}


def late() -> tuple[str, bool]:
    """Rank 0 does not come to the second call in time."""
    group, fused = resolve(None), compile(matmul.matmul_kernel, PUSH)
    a, b, c = integers(32, 16, seed=1), integers(16, 16, seed=2), torch.zeros(64, 16).bfloat16()
    fused(a, b, c, *NUMBERS, **BLOCKS)
    if group.rank == 0:
        threading.Event().wait(3)
    with pytest.raises(PeerError) as caught:
        fused(a, b, c, *NUMBERS, **BLOCKS)
    return type(caught.value).__name__, bool(c.isnan().all())


def test_a_peer_that_does_not_come_ends_the_call():
    found = run_ranks(late, 2, group_timeout_s=1.0, timeout_s=30)
    assert found[1] == ["PeerTimeout", True]


def odd_one_out() -> list[str]:
    """Whatever one rank gets wrong, all hear of it, and the next call runs."""
    group, names = resolve(None), []
    fused = compile(matmul.matmul_kernel, PUSH)
    other = compile(matmul.matmul_kernel, "all_gather.pull") if group.rank else fused
    a, b, c = integers(32, 16, seed=1), integers(16, 16, seed=2), torch.zeros(64, 16).bfloat16()
    attempts: list[Callable[[], None]] = [
        lambda: other(a, b, c, *NUMBERS, **BLOCKS),
        lambda: fused(a if group.rank else a[:31], b, c, *NUMBERS, **BLOCKS),
        lambda: fused(a if group.rank else a.float(), b, c, *NUMBERS, **BLOCKS),
        lambda: fused(a, b, c, *NUMBERS, **BLOCKS, **({} if group.rank else {"NOTHING": 1})),
        lambda: fused(a, b, c, *NUMBERS, **{**BLOCKS, "BLOCK_M": 16 if group.rank else 0}),
        lambda: fused(a, b, c if group.rank else c[:32], *NUMBERS, **BLOCKS),  # tiles would write past its end
        lambda: fused(a, b if group.rank else b.float().numpy(), c, *NUMBERS, **BLOCKS),
    ]
    for attempt in attempts:
        with pytest.raises(InputError) as caught:
            attempt()
        names.append(type(caught.value).__name__)
    fused(a, b, c, *NUMBERS, **BLOCKS)
    return [*names, str(off(c, torch.cat([a, a]).float() @ b.float()))]


def test_what_one_rank_gets_wrong_all_ranks_hear():
    found = run_ranks(odd_one_out, 2)
    assert found[1] == [*["RankMismatch"] * 7, "0.0"]
    own = ["RankMismatch", "InputError", "RankMismatch", "InputError", "DirectiveError", "InputError", "InputError"]
    assert found[0] == [*own, "0.0"]

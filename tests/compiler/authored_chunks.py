"""Compiled kernels whose tensors are gathered chunk by chunk, by template and by hand: exact on CPU ranks.

Run by test_authored.py in a process of its own, as authored_kernels.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import overweave as ow  # noqa: E402
from examples.kernels import matmul  # noqa: E402
from overweave.errors import OverweaveError  # noqa: E402
from overweave.memory.group import Group, resolve  # noqa: E402
from overweave.ops.author.compile import FusedKernel, compile  # noqa: E402
from tests.compiler.annotated import changed  # noqa: E402
from tests.compiler.authored_kernels import (  # noqa: E402
    CALLS,
    WORLDS,
    attended,
    batches,
    gathered_matmul,
    integers,
    off,
    persistent_matmul,
    reduced_matmul,
    shard,
)
from tests.compiler.untruths.public_forms import INNER, PERSISTENT  # noqa: E402
from tests.compiler.untruths.public_rows import HEAD, RMS_NORM  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.source_tree import ROOT  # noqa: E402

TEMPLATES = (
    "all_gather.mesh pieces=1 col_pieces=2 lanes=2",
    "all_gather.ring",
    "all_gather.double_ring",
    "all_gather.islands",
)


@pytest.mark.parametrize(("world_size", "m"), [(2, 64), (3, 52), (4, 128), (4, 52)])
@pytest.mark.parametrize("schedule", TEMPLATES)
def test_a_gathered_matmul_is_exact(schedule: str, world_size: int, m: int):
    """Shards of whole tiles, and ragged ones."""
    assert run_ranks(gathered_matmul, world_size, schedule, m) == [[0.0] * CALLS] * world_size


def test_islands_of_eight():
    assert run_ranks(gathered_matmul, 8, "all_gather.islands island=4", 52) == [[0.0] * CALLS] * 8


def test_other_kernels_take_them_too():
    assert run_ranks(persistent_matmul, 4, "all_gather.islands", "A", 64) == [[0.0] * CALLS] * 4
    assert run_ranks(batches, 2, TEMPLATES[0], "B") == [[0.0] * CALLS] * 2
    found = run_ranks(attended, 2, "all_gather.double_ring", True)
    assert max(error for errors in found for error in errors) < 0.05


@pytest.mark.parametrize(
    ("world_size", "mover"),
    [*((ranks, "copy_engine") for ranks in WORLDS), (3, "copy_kernel"), (3, "bulk_kernel"), (3, "tiles"), (4, "tiles")],
)
def test_a_one_shot_all_reduce(world_size: int, mover: str):
    found = run_ranks(reduced_matmul, world_size, f"all_reduce.one_shot mover={mover}")
    assert len({str(errors) for errors in found}) == 1
    assert max(error for errors in found for error in errors) <= 2.0


def by_hand(rows: int, ranks: int) -> ow.Gather:
    """Rank 0 broadcasts its shard down a chain in two chunks; the others are pulled, the last one by columns."""
    size = rows // ranks
    moves: list[ow.Put | ow.Get] = []
    for half in ((0, size // 2), (size // 2, size)):
        moves += [ow.Put(rank, rank + 1, ow.Chunk(half)) for rank in range(ranks - 1)]
    for owner in range(1, ranks):
        for rank in range(ranks):
            if rank != owner:
                part = (owner * size, (owner + 1) * size)
                cut = [(0, 8), (8, 32)] if owner == ranks - 1 else [None]
                moves += [ow.Get(rank, owner, ow.Chunk(part, cols), lane=1) for cols in cut]
    return ow.Gather(ranks, tuple(moves))


def handmade(m: int) -> list[float]:
    return gathered_matmul(by_hand(m, resolve(None).world_size), m)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", WORLDS)
def test_moves_written_by_hand(world_size: int):
    assert run_ranks(handmade, world_size, 32 * world_size) == [[0.0] * CALLS] * world_size


def with_the_library(m: int) -> list[float]:
    lo, half = m // 2, m // 4
    first = ow.Collective((ow.Chunk((0, half)), ow.Chunk((lo, lo + half))))
    puts = ow.Put(0, 1, ow.Chunk((half, lo))), ow.Put(1, 0, ow.Chunk((lo + half, m)), after=((0, 1),))
    return gathered_matmul(ow.Gather(2, (first, *puts)), m)  # type: ignore[arg-type]


def test_a_part_is_the_librarys():
    assert run_ranks(with_the_library, 2, 64) == [[0.0] * CALLS] * 2


def carried_and_pulled(m: int, by_library: bool) -> list[float]:
    """Tiles push a part of rank 0's shard, of which peers come for the rest, or the library takes it."""
    half, whole = m // 4, m // 2
    own = ow.Chunk((half, whole))
    rest = (ow.Collective((own, ow.Chunk((whole, m)))),)
    pulled = (ow.Get(1, 0, own), ow.Get(0, 1, ow.Chunk((whole, m))))
    first = ow.Put(0, 1, ow.Chunk((0, half)), mover="tiles")
    return gathered_matmul(ow.Gather(2, (*(rest if by_library else pulled), first)), m)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("m", [52, 64])
def test_tiles_carry_what_was_copied_for_peers(m: int, by_library: bool):
    assert run_ranks(carried_and_pulled, 2, m, by_library) == [[0.0] * CALLS] * 2


def differing() -> str:
    """Ranks whose lists differ hear of it before anything is launched."""
    group = resolve(None)
    fused: FusedKernel = compile(matmul.matmul_kernel, by_hand(64 if group.rank else 128, 2))
    return refused(fused, group)


def refused(fused: FusedKernel, group: Group) -> str:
    a, b, c = torch.ones(32, 32), torch.ones(32, 16), torch.zeros(64, 16)
    try:
        fused(a, b, c, 64, 16, 32, 32, 1, 16, 1, 16, 1, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_M=4)
    except (OverweaveError, ValueError) as error:
        return type(error).__name__
    return "ran"


def test_lists_that_differ_are_heard_of_by_all():
    assert sorted(run_ranks(differing, 2)) == ["RankMismatch", "ScheduleError"]


def chosen(m: int) -> tuple[float, str, int]:
    """A call that chooses, a tuning on a CPU, which only ranks, and a call that takes what it found."""
    group, n, k = resolve(None), 24, 32
    a, b = integers(m, k, seed=1), integers(k, n, seed=7)
    configs = [{"BLOCK_M": 16, "BLOCK_N": block} for block in (16, 32)]
    auto = ow.compile_auto(matmul.matmul_kernel, "all_gather.auto", configs=configs, tile_us=20.0)
    arguments = (shard(a, group), b)
    errors = []
    for call in range(2):
        c = torch.full((m, n), torch.nan).bfloat16()
        rest = {"BLOCK_K": 16, "GROUP_M": 4}
        auto(*arguments, c, m, n, k, k, 1, n, 1, n, 1, **rest)
        errors.append(off(c, (a.float() @ b.float()).bfloat16()))
        if not call:
            times = auto.tune(*arguments, c, m, n, k, k, 1, n, 1, n, 1, **rest)
    return max(errors), str(times[0].way), len(times)


def test_an_automatic_schedule_chooses_and_is_right():
    found = run_ranks(chosen, 3, 96, timeout_s=120)
    assert len({str(one) for one in found}) == 1
    error, way, tried = found[0]
    assert error == 0.0
    assert way.startswith("A=all_gather.")
    assert "BLOCK_M=16" in way
    assert tried >= 8


WHOLE = (
    ("    # @overweave.axis S block=BLOCK_S streamed\n", ""),
    ("    # @overweave.stream S\n", ""),
    ("axis H block=1", "axis HEADS=H block=1"),
    ("H=head", "HEADS=head"),
    ("O=out[Q, H, D]", "O=out[Q, HEADS, D]"),
    ("K=k[S, H, D]", "K=k[S, H * D]"),
    ("V=v[S, H, D]", "V=v[S, H * D]"),
)


def attended_whole(path: str, schedule: str) -> float:
    """Keys and values are both extents of which every tile waits for all: their signals are one range."""
    group, heads, dim = resolve(None), 2, 16
    fused = compile(f"{path}:attention_kernel", {"K": schedule, "V": schedule})
    length = 32 * group.world_size
    q, k, v = (integers(length, heads, dim, seed=i) / 2 for i in range(3))
    mine, out = shard(q, group), torch.full((32, heads, dim), torch.nan).bfloat16()
    numbers = (len(mine), length, heads, dim, 0, dim**-0.5)
    fused(mine, shard(k, group), shard(v, group), out, *numbers, BLOCK_Q=16, BLOCK_S=16, CAUSAL=False)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.float().transpose(0, 1) for x in (q, k, v)))
    return off(out, exact.transpose(0, 1)[32 * group.rank :][:32])


@pytest.mark.parametrize("schedule", ["all_gather.push pieces=2", "all_gather.pull", "all_gather.ring"])
def test_two_tensors_of_which_tiles_read_all(tmp_path: Path, schedule: str):
    path = tmp_path / "attention.py"
    path.write_text(changed((ROOT / "examples" / "kernels" / "attention.py").read_text(), *WHOLE))
    assert max(run_ranks(attended_whole, 3, str(path), schedule)) < 0.05


def rows_of_a_tensor(path: str) -> float:
    """A kernel without a number of rows, whose tile's number is 64 bits wide."""
    group = resolve(None)
    fused = compile(f"{path}:rms_norm_forward_kernel", {"X": "all_gather.push"})
    x, weight = integers(10, 40, seed=1).float(), integers(40, seed=2).float()
    y, rstd = torch.full((10, 40), torch.nan), torch.full((10,), torch.nan)
    fused(y, 40, shard(x, group), 40, weight, rstd, 40, 1e-6, 0.0, BLOCK_SIZE=64)
    return off(y, x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * weight)


def test_extents_of_tensors(tmp_path: Path):
    path = tmp_path / "norm.py"
    path.write_text(HEAD + RMS_NORM.text)
    assert max(run_ranks(rows_of_a_tensor, 3, str(path))) < 1e-5


def persistent_of_the_tutorial(path: str) -> float:
    """The blocks of its store are reckoned from a second number."""
    group, (m, n, k) = resolve(None), (52, 24, 32)
    fused = compile(f"{path}:matmul_kernel_persistent", {"A": "all_gather.push pieces=2"})
    a, b, c = integers(m, k, seed=1).half(), integers(k, n, seed=7).half(), torch.full((m, n), torch.nan).half()
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 4, "NUM_SMS": 3}
    fused(shard(a, group), b, c, m, n, k, k, 1, n, 1, n, 1, **sizes)
    return off(c, a.float() @ b.float())


def test_a_persistent_loop_as_the_tutorial_writes_it(tmp_path: Path):
    path = tmp_path / "persistent.py"
    path.write_text(HEAD + PERSISTENT.text)
    assert max(run_ranks(persistent_of_the_tutorial, 3, str(path))) == 0.0


def attended_inside(path: str) -> float:
    """Keys and values are loaded by a function of the file, which is called twice."""
    group, length = resolve(None), 96
    fused = compile(f"{path}:attn_fwd", {"K": "all_gather.push", "V": "all_gather.push"})
    q, k, v = (integers(length, 16, seed=i).float() / 2 for i in range(3))
    out = torch.full((length, 16), torch.nan)
    fused(q, shard(k, group), shard(v, group), out, 0.25, length, HEAD_DIM=16, BLOCK_M=32, BLOCK_N=16, STAGE=3)
    return off(out, torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])


def test_directives_inside_a_function_of_the_file(tmp_path: Path):
    path = tmp_path / "attention.py"
    path.write_text(HEAD + INNER.text)
    assert max(run_ranks(attended_inside, 3, str(path))) < 1e-3

"""Calls of compiled kernels on CPU ranks beside the table: who is late or wrong, what chooses, and files of others.

Run by test_authored.py in a process of its own, as authored_table.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import overweave as ow  # noqa: E402
from campaigns.exact.authored_runs import round_trip  # noqa: E402
from examples.kernels import matmul  # noqa: E402
from overweave.errors import InputError, OverweaveError, PeerError  # noqa: E402
from overweave.memory.group import Group, resolve  # noqa: E402
from overweave.ops.author.compile import FusedKernel, compile  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from tests.compiler.annotated import changed  # noqa: E402
from tests.compiler.untruths.public_forms import INNER, PERSISTENT  # noqa: E402
from tests.compiler.untruths.public_rows import HEAD, RMS_NORM, Form  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.source_tree import ROOT  # noqa: E402

load("host author")  # here, once, and not in every rank
try_in_copies()
PUSH = "all_gather.push pieces=2"


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


def differing() -> str:
    """Ranks whose lists differ hear of it before anything is launched."""
    group = resolve(None)
    fused: FusedKernel = compile(matmul.matmul_kernel, round_trip(2, 64 if group.rank else 128, 32))
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


def persistent_of_the_tutorial(path: str) -> float:
    """The blocks of its store are reckoned from a second number."""
    group, (m, n, k) = resolve(None), (52, 24, 32)
    fused = compile(f"{path}:matmul_kernel_persistent", {"A": "all_gather.push pieces=2"})
    a, b, c = integers(m, k, seed=1).half(), integers(k, n, seed=7).half(), torch.full((m, n), torch.nan).half()
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 4, "NUM_SMS": 3}
    fused(shard(a, group), b, c, m, n, k, k, 1, n, 1, n, 1, **sizes)
    return off(c, a.float() @ b.float())


def attended_inside(path: str) -> float:
    """Keys and values are loaded by a function of the file, which is called twice."""
    group, length = resolve(None), 96
    fused = compile(f"{path}:attn_fwd", {"K": "all_gather.push", "V": "all_gather.push"})
    q, k, v = (integers(length, 16, seed=i).float() / 2 for i in range(3))
    out = torch.full((length, 16), torch.nan)
    fused(q, shard(k, group), shard(v, group), out, 0.25, length, HEAD_DIM=16, BLOCK_M=32, BLOCK_N=16, STAGE=3)
    return off(out, torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])


@pytest.mark.parametrize(
    ("call", "form", "most"),
    [(rows_of_a_tensor, RMS_NORM, 1e-5), (persistent_of_the_tutorial, PERSISTENT, 0.0), (attended_inside, INNER, 1e-3)],
)
def test_a_kernel_of_a_file_as_it_is_written(tmp_path: Path, call: Callable[[str], float], form: Form, most: float):
    path = tmp_path / "kernel.py"
    path.write_text(HEAD + form.text)
    assert max(run_ranks(call, 3, str(path))) <= most

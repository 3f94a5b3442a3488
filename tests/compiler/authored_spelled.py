"""Kernels that say the same in other words, on CPU ranks: what a spelling becomes is right, and not only text.

Run by test_authored.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.memory.group import resolve  # noqa: E402
from overweave.ops.author.compile import FusedKernel  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from tests.compiler.annotated import ROWS, SCALE, STREAMED, changed, fused  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host author")  # here, once, and not in every rank
try_in_copies()

M, N, BLOCK, WORLD = 96, 32, 16, 3
GATHER = "all_gather.push pieces=2"
BLOCKS = (
    "shape=(M, N), strides=(N, 1), offsets=(pid_m * BLOCK_M, pid_n * BLOCK_N), "
    "block_shape=(BLOCK_M, BLOCK_N), order=(1, 0)"
)
SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "plainly": (),
    "pointers before the tile": (
        ("    # @overweave.tile_id\n", "    base = x_ptr + tl.arange(0, BLOCK_N)[None, :]\n    # @overweave.tile_id\n"),
        ("x_ptr + at", "base + rows[:, None] * N + pid_n * BLOCK_N"),
    ),
    "pointers of a function": (("tl.load(x_ptr + at)", "tl.load(helper(x_ptr) + helper(at))"),),
    "block pointers": (
        ("    x = tl.load(x_ptr + at)\n", f"    x = tl.load(tl.make_block_ptr(base=x_ptr, {BLOCKS}))\n"),
    ),
    "constants by default": (
        ("BLOCK_M: tl.constexpr", "BLOCK_M: tl.constexpr = 16"),
        ("BLOCK_N: tl.constexpr", "BLOCK_N: tl.constexpr = 16"),
    ),
    "arguments by name": (
        ("tl.load(x_ptr + at)", "tl.load(mask=at >= 0, pointer=x_ptr + at)"),
        ("tl.store(y_ptr + at, x)", "tl.store(value=x, pointer=y_ptr + at)"),
    ),
    "its number becomes a block": (
        ("M=pid_m N=pid_n", "M=pid N=pid_n"),
        ("    pid_m = pid // tl.cdiv(N, BLOCK_N)\n", ""),
        ("    # @overweave.dispatch end\n", "    pid = pid // tl.cdiv(N, BLOCK_N)\n    # @overweave.dispatch end\n"),
        ("pid_m *", "pid *"),
    ),
    "a later place": (
        ("    # @overweave.store", "    place = y_ptr + at\n    # @overweave.store"),
        ("tl.store(y_ptr + at, x)", "tl.store(place, x)"),
    ),
}


def renamed(text: str) -> str:
    """The same text with the language under another name."""
    return text.replace("import triton.language as tl", "from triton import language as T").replace("tl.", "T.")


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def scaled(made: FusedKernel) -> bool:
    group = resolve(None)
    x, y = integers(M, N, seed=1), torch.full((M, N), torch.nan)
    named: dict[str, Any] = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK}
    constants = {name: value for name, value in named.items() if name not in made.kernel.source.defaults}
    made(x.chunk(group.world_size)[group.rank].clone(), y, torch.empty(1), M, N, **constants)
    return torch.equal(x, y)


@pytest.mark.parametrize(
    ("alias", "schedule"),
    [("tl", GATHER), ("tl", "all_gather.pull"), ("tl", "all_gather.push mover=tiles"), ("T", GATHER)],
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_however_it_is_spelled(tmp_path: Path, spelling: str, alias: str, schedule: str):
    text = changed(SCALE, *SPELLINGS[spelling])
    assert (
        run_ranks(scaled, WORLD, fused(tmp_path, renamed(text) if alias == "T" else text, schedule)) == [True] * WORLD
    )


def test_in_a_package_with_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "kernels_of_a_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "parts.py").write_text("import triton\n\n\n@triton.jit\ndef same(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    change = (("import triton\n", "import triton\nfrom .parts import same\n"), ("at, x)", "at, same(x))"))
    assert all(run_ranks(scaled, WORLD, fused(folder, SCALE, GATHER, *change)))
    assert "kernels_of_a_package" not in sys.modules  # ranks import it, this process reads it


def running(made: FusedKernel) -> bool:
    """Every rank adds up along its own rows; what it stores elsewhere stays on it."""
    group, rows = resolve(None), 4
    x = integers(group.world_size * rows, 64, seed=2)
    own = x.chunk(group.world_size)[group.rank].clone()
    y, z = torch.full_like(x, torch.nan), torch.full_like(own, torch.nan)
    made(own, y, z, rows, 64, BLOCK=BLOCK)
    exact = x.view(-1, 64 // BLOCK, BLOCK).cumsum(1).view_as(x)
    return torch.equal(y, exact) and torch.equal(z, exact.chunk(group.world_size)[group.rank])


@pytest.mark.parametrize("schedule", ["spread.push", "spread.push mover=tiles", "spread.push mover=copy_kernel"])
def test_a_store_in_a_loop_that_adds_up(tmp_path: Path, schedule: str):
    assert all(run_ranks(running, WORLD, fused(tmp_path, ROWS, schedule)))


def weighed(made: FusedKernel) -> bool:
    group, turns = resolve(None), M // BLOCK
    q, k, out = integers(32, 16, seed=3), integers(M, 16, seed=4), torch.full((32,), torch.nan)
    made(q, k.chunk(group.world_size)[group.rank].clone(), out, 32, M, D=16, BLOCK=BLOCK)
    return torch.equal(out, (q @ k.T).sum(1) / turns)


@pytest.mark.parametrize("schedule", [GATHER, "all_gather.ring", "all_gather.push mover=bulk_kernel"])
def test_a_streamed_loop_finds_its_rows_by_its_variable(tmp_path: Path, schedule: str):
    assert all(run_ranks(weighed, WORLD, fused(tmp_path, STREAMED, schedule)))

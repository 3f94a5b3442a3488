"""torchtitan's fused projections on CPU ranks, answered by overweave (`make adapters-test`)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from tests.ranks import run_ranks
from tests.source_tree import ROOT

pytest.importorskip("torchtitan")
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common import dist_gemm as stock
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from overweave.adapters import torchtitan as adapter

pytestmark = pytest.mark.adapters
HIDDEN, BATCH, ROWS, MOST_OFF = 32, 2, 8, 1e-5
# A folder with torchtitan's own tests, which its package leaves out: tests/unit_tests of its repository.
THEIR_TESTS = "TORCHTITAN_TESTS"
COMMAND = (ROOT / "examples" / "torch" / "with_torchtitan.sh").read_text()  # as the documentation shows it
TARGETS = COMMAND.split()[-1].split(",")


class Layers(Module):
    """The projections of a block, as torchtitan builds them with `tp_gemm_backend="dist_gemm"`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        qkv: stock.AllGatherFusedQKVLinear.Config
        wo: stock.RowParallelLinear.Config
        feed_forward: stock.AllGatherFusedFeedForward.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.qkv, self.wo, self.feed_forward = config.qkv.build(), config.wo.build(), config.feed_forward.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        mixed = (q * k.repeat_interleave(2, 2) + v.repeat_interleave(2, 2)).flatten(2)
        return self.feed_forward(self.wo(mixed))


def config(ranks: int) -> Layers.Config:
    """Of one rank's part; of the whole where `ranks` is one."""
    heads, part = 8 // ranks, HIDDEN // ranks
    wide = Linear.Config(in_features=HIDDEN, out_features=part * 2)
    return Layers.Config(
        qkv=stock.AllGatherFusedQKVLinear.Config(head_dim=4, n_heads=heads, n_kv_heads=heads // 2, wqkv=wide),
        wo=stock.RowParallelLinear.Config(in_features=part, out_features=HIDDEN),
        feed_forward=stock.AllGatherFusedFeedForward.Config(
            w1=wide, w3=wide, w2=Linear.Config(in_features=part * 2, out_features=HIDDEN)
        ),
    )


def off(by: str) -> tuple[float, list[str]]:
    """For `run_ranks`: how far the layers, forward and backward, are from the whole ones, and what answered.

    by: `overrides`, or `install`, which puts overweave behind what torchtitan's own modules call.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = config(ranks)
    if by == "overrides":
        apply_overrides(OverrideConfig(imports=TARGETS), parts)
    torch.manual_seed(0)
    whole, own = config(1).build(), parts.build()
    for each in whole.parameters():
        torch.nn.init.normal_(each, std=0.3)
    dims = {"qkv.wqkv.weight": 0, "wo.weight": 1, "feed_forward.w1.weight": 0, "feed_forward.w3.weight": 0}
    dims["feed_forward.w2.weight"] = 1
    cut = {name: each.detach().chunk(ranks, dims[name])[rank].clone() for name, each in whole.named_parameters()}
    for name, each in own.named_parameters():
        each.data = cut[name]
    x = torch.randn(BATCH, ROWS, HIDDEN, requires_grad=True)
    shard = x.detach().chunk(ranks, 1)[rank].clone().requires_grad_()
    ow.install(strict=True)
    before = answered()
    try:
        with (
            patch.object(stock, "_tp_group_from_context", lambda: dist.group.WORLD),
            patch.object(torch, "mm", _product),
        ):
            y = own(shard)
            factors = torch.arange(x.numel()).reshape(x.shape).sin()
            (y * factors.chunk(ranks, 1)[rank]).sum().backward()
    finally:
        ow.uninstall()
    wanted = whole(x)
    (wanted * factors).sum().backward()
    pairs = [(y, wanted.chunk(ranks, 1)[rank]), (shard.grad, x.grad.chunk(ranks, 1)[rank])]
    truth = dict(whole.named_parameters())
    pairs += [(each.grad, truth[name].grad.chunk(ranks, dims[name])[rank]) for name, each in own.named_parameters()]
    distance = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return distance, [type(each).__module__ for each in own.children()] + [f"{answered() - before}"]


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """torch.mm, which has no out_dtype on a CPU."""
    return torch.matmul(a, b, **options).to(out_dtype or a.dtype)


def answered() -> int:
    return sum(each.by_overweave for each in ow.report().operators.values())


@pytest.mark.parametrize(("by", "module", "calls"), [("overrides", adapter, 0), ("install", stock, 10)])
def test_projections_compute_what_the_whole_ones_do(by: str, module: ModuleType, calls: int):
    for distance, told in run_ranks(off, 2, by):
        assert distance <= MOST_OFF
        assert told == [module.__name__] * 3 + [str(calls)]


# What stands before the text of their test: who answers torch's operators on a CPU, in each rank.
ANSWERS = {
    "fallbacks": """
import torch
from torch.distributed import _symmetric_memory as symm_mem

LIBRARY = torch.library.Library("symm_mem", "IMPL")
for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
    LIBRARY.impl(name, getattr(symm_mem, f"_{name}_fallback"), "CPU")
""",
    "overweave": "import overweave\n\noverweave.install(strict=True)\n",
}


@pytest.mark.skipif(not os.environ.get(THEIR_TESTS), reason=f"{THEIR_TESTS} names no folder of torchtitan's tests")
def test_what_passes_with_torchs_fallbacks_passes_with_overweave(tmp_path: Path):
    text = (Path(os.environ[THEIR_TESTS]) / "test_distributed_linear.py").read_text()
    lifted = text.replace('@unittest.skipUnless(torch.cuda.is_available(), "symmetric memory requires CUDA")', "")
    assert lifted != text
    passed = {}
    for by, lines in ANSWERS.items():
        file = tmp_path / by / "test_lifted.py"
        file.parent.mkdir()
        file.write_text(lines + lifted)
        options = ["-rA", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(file)]
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
        passed[by] = {line.split("::")[-1] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    assert passed["fallbacks"]
    assert passed["fallbacks"] <= passed["overweave"]

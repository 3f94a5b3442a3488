"""The campaign of blocks without communication, in small and on a CPU: it judges results, and tells the rest."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from campaigns.torch import torch_block
from campaigns.torch.torch_block import Here, Pair
from overweave.block.cases import BlockSizes
from overweave.memory.group import resolve
from overweave.tuner.measure.timer import Effort
from tests.ranks import run_ranks

SMALL = BlockSizes(64, 128, 8, 4)


def here() -> Here:
    return Here(torch.device("cpu"), resolve(None), Effort(rounds=1, warmup=0, host_calls=0), bursts=1)


def told() -> list[str]:
    return [str(each) for each in torch_block.verdicts({"tiny": SMALL}, (16,), here())]


@pytest.mark.slow
def test_every_line():
    (lines,) = run_ranks(told, 1)
    words = [
        f"told  tiny a rank of {ranks},    16 tokens, {word}"
        for ranks in (1, 4)
        for word in ("forward", "training", "fused")
    ]
    assert [line.split(":")[0].rstrip() for line in lines[:6]] == words
    layers = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce")
    assert [line.split(" us ")[0].rsplit(":", 1)[0] for line in lines[6:]] == [
        f"told  {word}: {layer}" for layer in layers for word in ("host", "host, recorded")
    ]


def wrong() -> list[bool | None]:
    pair = Pair.of(SMALL, 4, here())
    with torch.no_grad():
        pair.plain.get_submodule("mlp.down").weight.mul_(-1)
    held = [holds for _, _, holds in torch_block.of_block(pair, 16, SMALL.width, here())]
    with patch.object(torch_block, "silu", torch.relu):
        return held + [holds for _, _, holds in torch_block.of_linears(pair.plain, 16, here())]


@pytest.mark.slow
def test_other_results_fail():
    assert run_ranks(wrong, 1) == [[False, False, False]]


@pytest.mark.parametrize(("found", "holds"), [(1.02, True), (1.03, False)])
def test_a_bar_is_judged_on_a_gpu_only(found: float, holds: bool):
    gpu = Here(torch.device("cuda"), None, Effort())
    assert gpu.bar(found <= torch_block.SLOWER) is holds
    assert gpu._replace(device=torch.device("cpu")).bar(found <= torch_block.SLOWER) is None

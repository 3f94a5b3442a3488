"""DeepSpeed's row-parallel layer on CPU ranks, answered by overweave (`make adapters-test`)."""

from __future__ import annotations

import io
import runpy
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overweave.errors import InputError
from tests.ranks import run_ranks
from tests.source_tree import ROOT

pytest.importorskip("deepspeed")
from deepspeed import comm
from deepspeed.module_inject import layers as stock

from overweave.adapters import deepspeed as adapter
from overweave.functional import linear_all_reduce

pytestmark = pytest.mark.adapters
ROWS, BATCH, N, MOST_OFF = 6, 2, 12, 1e-6


def as_documented() -> str:
    """For `run_ranks`: what the example prints."""
    printed = io.StringIO()
    with patch.object(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None), redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / "torch" / "with_deepspeed.py"))
    return printed.getvalue()


def test_the_example_runs():
    assert "as one GPU would: True" in run_ranks(as_documented, 2)[0]


def off(width: int, trains: bool) -> tuple[float, int]:
    """For `run_ranks`: how far a layer of AutoTP is from the whole one, and how often overweave answered."""
    backend = import_module("deepspeed.comm.torch")
    with patch.object(backend, "build_shm_op", lambda: None):  # it would be compiled, and is not asked here
        comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    stock.set_autotp_mode(training=trains)
    torch.manual_seed(0)
    whole = nn.Linear(width, N)
    group = dist.group.WORLD
    part = stock.LinearAllreduce(_copy(whole), group)
    x = torch.randn(BATCH, ROWS, width)
    lo = sum(part._partition_sizes[: dist.get_rank()])
    own = x[..., lo : lo + part._partition_sizes[dist.get_rank()]].contiguous().requires_grad_(trains)
    adapter.register()
    try:
        with patch.object(adapter, "linear_all_reduce", wraps=linear_all_reduce) as answers:
            y = part(own)
    finally:
        adapter.unregister()
    pairs = [(y, whole(x))]
    if trains:
        factors = torch.arange(y.numel()).reshape(y.shape).sin()
        (y * factors).sum().backward()
        (pairs[0][1] * factors).sum().backward()
        columns = whole.weight.grad[:, lo : lo + own.shape[-1]]
        pairs += [(part.weight.grad, columns), (part.bias.grad, whole.bias.grad)]
        pairs += [(own.grad, (factors @ whole.weight)[..., lo : lo + own.shape[-1]])]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs), answers.call_count


def _copy(layer: nn.Linear) -> nn.Linear:
    made = nn.Linear(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_computes_what_the_whole_one_does(trains: bool):
    for distance, calls in run_ranks(off, 2, 16, trains):
        assert distance <= MOST_OFF
        assert calls == 1


def test_unlike_widths_are_deepspeeds():
    for distance, calls in run_ranks(off, 2, 15, False):
        assert distance <= MOST_OFF
        assert calls == 0


def test_the_forward_is_replaced_once_and_given_back():
    original: Any = stock.LinearAllreduce.forward
    adapter.register()
    try:
        with pytest.raises(InputError, match="once"):
            adapter.register()
    finally:
        adapter.unregister()
    assert stock.LinearAllreduce.forward is original
    with pytest.raises(InputError, match="register"):
        adapter.unregister()

"""Megatron-core's linear layers on CPU ranks, answered by overweave (`make adapters-test`)."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.source_tree import ROOT

pytest.importorskip("megatron.core")
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as stock
from megatron.core.transformer.transformer_config import TransformerConfig

from overweave.adapters import megatron as adapter

pytestmark = pytest.mark.adapters
K, N, BATCH, ROWS, MOST_OFF = 16, 32, 2, 6, 1e-6


def off(is_split: bool, has_main_grad: bool, dtype: torch.dtype = torch.float32) -> float:
    """For `run_ranks`: how far a column- and a row-parallel layer, forward and backward, are from the whole ones."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=K,
            num_attention_heads=4,
            use_cpu_initialization=True,
            tensor_model_parallel_size=ranks,
            sequence_parallel=is_split,
            params_dtype=dtype,
        )
        options = {"config": config, "bias": True, "skip_bias_add": False, "init_method": torch.nn.init.xavier_normal_}
        torch.manual_seed(0)
        up = adapter.ColumnParallelLinear(K, N, gather_output=False, **options)
        down = adapter.RowParallelLinear(N, K, input_is_parallel=True, **options)
        for layer in (up, down) if has_main_grad else ():
            layer.gradient_accumulation_fusion = True  # Megatron's own needs a CUDA extension to be made with it
            layer.weight.main_grad = torch.zeros_like(layer.weight)
        weights = [gathered(up.weight, 0), gathered(down.weight, 1)]
        whole = (
            torch.randn(ROWS * ranks, BATCH, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        )
        own = (whole.detach().chunk(ranks)[rank] if is_split else whole.detach()).clone().requires_grad_()
        y, _ = down(up(own)[0].relu())
        wanted = (whole @ weights[0].t()).relu() @ weights[1].t()
        cut = (lambda t: t.chunk(ranks)[rank]) if is_split else (lambda t: t)
        factors = torch.arange(wanted.numel()).reshape(wanted.shape).sin()
        (y * cut(factors)).sum().backward()
        (wanted * factors).sum().backward()
        made = [layer.weight.main_grad if has_main_grad else layer.weight.grad for layer in (up, down)]
        truth = [weights[0].grad.chunk(ranks, 0)[rank], weights[1].grad.chunk(ranks, 1)[rank]]
        pairs = [(y, cut(wanted)), (own.grad, cut(whole.grad)), *zip(made, truth, strict=True)]
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    finally:
        parallel_state.destroy_model_parallel()


def gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    """A whole weight, as a leaf."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts, dim).requires_grad_()


@pytest.mark.parametrize(("is_split", "has_main_grad"), [(True, False), (True, True), (False, False)])
def test_layers_compute_what_the_whole_ones_do(is_split: bool, has_main_grad: bool):
    assert max(run_ranks(off, 2, is_split, has_main_grad)) <= MOST_OFF


def test_a_dtype_that_no_operator_takes_is_megatrons():
    assert max(run_ranks(off, 2, False, False, torch.float64)) <= MOST_OFF


def test_the_example_runs(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples" / "torch" / "with_megatron.py"))
    told = capsys.readouterr().out
    assert f"{adapter.ColumnParallelLinear} {adapter.RowParallelLinear}" in told


@pytest.mark.parametrize("experts", [None, 4])
def test_a_spec_names_overweaves_layers(experts: int | None):
    told = str(adapter.woven(get_gpt_layer_local_spec(num_experts=experts)))
    assert "overweave.adapters.megatron.ColumnParallelLinear" in told
    assert "overweave.adapters.megatron.RowParallelLinear" in told
    assert stock.__name__ not in told


def test_a_weight_that_megatron_gathers_is_megatrons(monkeypatch: pytest.MonkeyPatch):
    """As layers of 0.19 are whose weights are sharded over another group, too."""
    monkeypatch.setattr(stock.ColumnParallelLinear, "_forward_impl", lambda self, *given, **options: "theirs")
    monkeypatch.setattr(stock.RowParallelLinear, "forward", lambda self, x: "theirs")
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    layers: list[Any] = [kind.__new__(kind) for kind in (adapter.ColumnParallelLinear, adapter.RowParallelLinear)]
    for layer in layers:
        torch.nn.Module.__init__(layer)
    column, row = layers
    assert column._forward_impl(x, w, sequence_parallel=True, gtp_remat_size=2) == "theirs"
    row.explicit_expert_comm, row.input_is_parallel, row.gtp_remat_size = False, True, 2
    row.config = SimpleNamespace(_cpu_offloading_context=None)
    assert row.forward(x) == "theirs"

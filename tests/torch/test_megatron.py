"""Megatron-core's linear layers and its token dispatcher on CPU ranks, by overweave (`make adapters-test`)."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.source_tree import ROOT

pytest.importorskip("megatron.core")
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as stock
from megatron.core.transformer.moe import token_dispatcher as dispatchers_of_megatron
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from overweave import moe
from overweave.adapters import megatron as adapter
from overweave.adapters import megatron_experts as experts_adapter

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
    assert ("overweave.adapters.megatron_experts.MoELayer" in told) == (experts is not None)


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


TOKENS, EXPERTS, TOP = 5, 4, 2


def experts_off(is_pushed: bool, top: int = TOP) -> float:
    """For `run_ranks`: how far experts of two ranks, forward and backward, are from one rank that has them all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    try:
        dispatcher = dispatcher_of(experts_config(ranks, top=top), ranks, rank)
        if is_pushed:
            dispatcher.push = moe.Push(tokens=TOKENS + ranks)
        own = TOKENS + rank
        draw = torch.Generator().manual_seed(1 + rank)
        same = torch.Generator().manual_seed(0)
        weights = torch.randn(EXPERTS, K, K, generator=same)
        x = torch.randn(own, 1, K, generator=draw).requires_grad_()
        scores = torch.rand(own, EXPERTS, generator=draw).requires_grad_()
        chosen = torch.zeros(own, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(top).indices, True)
        chosen[0] = False  # a token that was dropped
        factors = torch.arange(own * K).reshape(own, 1, K).sin()
        results = []
        for layer in (of_ranks, of_one):
            y = layer(dispatcher, (x, chosen, scores * chosen), weights)
            (y * factors).sum().backward()
            results.append((y.detach(), x.grad, scores.grad))
            x.grad = scores.grad = None
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True))
    finally:
        parallel_state.destroy_model_parallel()


def experts_config(ranks: int, dispatcher: str = "alltoall", top: int = TOP) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=K,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=top,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=ranks,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
    )


def dispatcher_of(config: TransformerConfig, ranks: int, rank: int) -> adapter.TokenDispatcher:
    group = parallel_state.get_expert_model_parallel_group()
    alone = parallel_state.get_tensor_model_parallel_group()
    groups = SimpleNamespace(ep=group, expt_tp=alone, tp_ep=group)
    held = EXPERTS // ranks
    return adapter.TokenDispatcher(held, [held * rank + each for each in range(held)], config, groups)


def of_ranks(dispatcher: Any, given: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    """As MoELayer does, with experts that are a matmul each, weighed."""
    tokens, probs = dispatcher.dispatch_preprocess(*given)
    rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(tokens, probs))
    own = dispatcher.local_expert_indices
    parts = [part @ weights[expert] for part, expert in zip(rows.split(counts.tolist()), own, strict=True)]
    made = torch.cat(parts) * probs.unsqueeze(1)
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(made)))


def of_one(_: Any, given: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
    x, chosen, probs = given
    return torch.einsum("tbk,ekn,te->tbn", x, weights, probs * chosen)


@pytest.mark.parametrize(("is_pushed", "top"), [(False, 2), (True, 2), (True, 3)])
def test_a_dispatcher_sends_tokens_to_their_experts_and_back(is_pushed: bool, top: int):
    assert max(run_ranks(experts_off, 2, is_pushed, top)) <= MOST_OFF


def dispatchers() -> list[str]:
    """Of a layer that Megatron builds of a spec: Megatron's dispatcher makes a CUDA stream, of which none is needed."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    spec = adapter.woven(get_gpt_layer_local_spec(num_experts=EXPERTS).submodules.mlp)
    found = []
    try:
        for kind in ("alltoall", "allgather"):
            with patch.object(dispatchers_of_megatron.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object()):
                found.append(type(build_module(spec, config=experts_config(ranks, kind)).token_dispatcher).__name__)
    finally:
        parallel_state.destroy_model_parallel()
    return found


def test_a_layer_of_experts_has_overweaves_dispatcher_in_place_of_alltoall():
    assert run_ranks(dispatchers, 2) == [["TokenDispatcher", "MoEAllGatherTokenDispatcher"]] * 2


def reasons() -> list[str]:
    """Why Megatron's dispatcher stays."""
    kind = dispatchers_of_megatron.MoEAlltoAllTokenDispatcher
    plain = {"tp_size": 1, "shared_experts": None}
    config = SimpleNamespace(moe_pad_expert_input_to_capacity=False)

    def reason(config: Any = config, kind: type = kind, **given: Any) -> str:
        theirs = kind.__new__(kind)
        vars(theirs).update(plain | given)
        return experts_adapter._obstacle(theirs, config)

    padded = SimpleNamespace(moe_pad_expert_input_to_capacity=True)
    other = dispatchers_of_megatron.MoEAllGatherTokenDispatcher
    return [reason(), reason(kind=other), reason(tp_size=2), reason(shared_experts=1), reason(padded)]


def test_what_the_dispatcher_cannot_do_is_megatrons():
    first, *others = reasons()
    assert not first
    assert len(set(others)) == 4
    assert all(others)

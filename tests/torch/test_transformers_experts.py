"""Experts of Transformers' models, computed by overweave and by Transformers (`make adapters-test`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel", reason="an older Transformers")
from overweave.adapters import transformers_experts as adapter  # noqa: E402
from overweave.adapters.report import site  # noqa: E402

pytestmark = pytest.mark.adapters
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 95,
    "pad_token_id": 0,
}
KINDS = {
    "mixtral": transformers.MixtralForCausalLM,
    "qwen3": transformers.Qwen3MoeForCausalLM,
    "gpt_oss": transformers.GptOssForCausalLM,
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    adapter.register_experts()
    config = KINDS[kind].config_class(**SIZES)
    model = KINDS[kind](config)
    for parameter in model.parameters():  # some of them are made without values
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def outcome(model: Any, by: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and all gradients."""
    model.set_experts_implementation(by)
    model.zero_grad()
    logits = model(torch.arange(32).view(2, 16) % 96).logits
    logits.float().square().mean().backward()
    return logits.detach(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("kind", KINDS)
def test_models_compute_the_same(kind: str):
    model, before = model_of(kind), site(adapter.EXPERTS).by_overweave
    wanted, found = outcome(model, "eager"), outcome(model, "overweave")
    assert site(adapter.EXPERTS).by_overweave == before + 2
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, each in wanted[1].items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-3, atol=1e-6)


def experts_of(kind: str) -> Any:
    model = model_of(kind)
    model.set_experts_implementation("overweave")
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


def test_sentinels_are_no_experts():
    layer = experts_of("mixtral")
    x, weights = torch.randn(3, 32), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [4, 2], [4, 4]])  # of four experts
    y = layer(x, ids, weights.masked_fill(ids == 4, float("nan")))
    torch.testing.assert_close(y[:1], layer(x[:1], ids[:1], weights[:1]))
    torch.testing.assert_close(y[1:2], layer(x[1:2], ids[1:2, 1:], weights[1:2, 1:]))
    assert torch.equal(y[2], torch.zeros(32))


def sent() -> list[float]:
    """How far expert parallel experts are off those of one process: the sums of this rank's tokens, and a gradient."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, part = experts_of("mixtral"), experts_of("mixtral")
    own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    part.gate_up_proj = torch.nn.Parameter(part.gate_up_proj[own].detach())
    part.down_proj = torch.nn.Parameter(part.down_proj[own].detach())
    part.num_experts, part._is_expert_parallel = 4 // ranks, True
    ep, tp = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
    kind = expert_parallel.EPImplementationInterface()["overweave"]
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(5, 32, generator=draw).requires_grad_()
    other = x.detach().clone().requires_grad_()
    ids, weights = torch.randint(0, 4, (5, 2), generator=draw), torch.rand(5, 2, generator=draw)
    y, wanted = kind(part, ep, tp)(x, ids, weights), whole(other, ids, weights)
    y.square().sum().backward()
    wanted.square().sum().backward()
    return [float((y - wanted).abs().max()), float((x.grad - other.grad).abs().max())]


@pytest.mark.skipif(
    not hasattr(expert_parallel, "EPImplementationInterface"), reason="this Transformers has no such registry"
)
def test_tokens_are_sent_to_experts_of_other_ranks():
    assert all(off < 1e-4 for told in run_ranks(sent, 2) for off in told)

"""Attention of Transformers' models over ranks' rows of a sequence, beside Transformers' own (`make adapters-test`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
from overweave.adapters import transformers_attention as adapter  # noqa: E402
from overweave.attention import zigzag_order  # noqa: E402
from overweave.errors import InputError  # noqa: E402

pytestmark = pytest.mark.adapters
TOKENS = 24
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 95,
    "pad_token_id": 0,
}
KINDS = {
    "llama": (transformers.LlamaForCausalLM, {}, "zigzag"),
    "mistral": (transformers.MistralForCausalLM, {"sliding_window": 5}, "contiguous"),
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    made, more, _ = KINDS[kind]
    return made(made.config_class(**SIZES, **more))


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.float().square().sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def differs(kind: str, plan: str) -> float:
    """How far logits and gradients of this rank's rows, the latter summed over ranks, are off those of the whole."""
    layout, rank, ranks = KINDS[kind][2], dist.get_rank(), dist.get_world_size()
    order = zigzag_order(TOKENS, ranks) if layout == "zigzag" else torch.arange(TOKENS)
    rows, ids = order.chunk(ranks)[rank], torch.arange(2 * TOKENS).view(2, TOKENS) % 96
    adapter.register_attention(sequence=layout, plan=plan)
    model = model_of(kind)
    model.set_attn_implementation("sdpa")
    wanted = model(ids, use_cache=False).logits
    of_whole = gradients(model, wanted)
    model.set_attn_implementation("overweave")
    found = model(ids[:, rows], position_ids=rows[None], use_cache=False).logits
    off = [float((found - wanted[:, rows]).detach().abs().max() / wanted.detach().abs().max())]
    for name, each in gradients(model, found).items():
        dist.all_reduce(each)
        off.append(float((each - of_whole[name]).abs().max() / of_whole[name].abs().max().clamp(min=1e-6)))
    return max(off)


@pytest.mark.parametrize("plan", ["sequential", "per_shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_rows_is_the_model(kind: str, plan: str):
    assert max(run_ranks(differs, 2, kind, plan, timeout_s=240)) < 1e-4


def refused() -> list[str]:
    adapter.register_attention()
    model, told = model_of("llama"), []
    model.set_attn_implementation("overweave")
    ids, padded = torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0]])
    for options in ({"attention_mask": padded}, {"past_key_values": None, "use_cache": True}):
        try:
            found = model(ids, **options)
            model(ids[:, :1], past_key_values=found.past_key_values)
        except InputError as error:
            told.append(str(error))
    return told


def test_padding_and_caches_are_refused():
    for padding, cache in run_ranks(refused, 2, timeout_s=240):
        assert "padding" in padding
        assert "keys of a cache" in cache

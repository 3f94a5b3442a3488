"""A layer of experts as a module: what its function computes, with a shared expert, and its gradients."""

from __future__ import annotations

import pytest
import torch

from overweave import moe
from overweave.errors import InputError
from tests.ranks import run_ranks


def outcomes() -> list[bool]:
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(3, 8).requires_grad_()
    weights, ids = torch.rand(3, 4).topk(2)
    found = []
    for plan in (None, "push"):
        shared = torch.nn.Linear(8, 8)
        layer = moe.ExpertsMlp(
            (4, 8, 16 * torch.distributed.get_world_size()), glu=moe.GPT_OSS, bias=True, shared=shared, plan=plan
        )
        torch.nn.init.normal_(layer.up_bias)
        given = moe.ExpertWeights(layer.up, layer.down, layer.up_bias, layer.down_bias, layer.glu)
        y = layer(x, ids, weights)
        wanted = moe.experts_mlp(x, ids, weights, given) + shared(x)
        with torch.inference_mode():  # by one chain, where the plan is push
            found.append(torch.allclose(layer(x, ids, weights), wanted, atol=1e-5))
        y.sum().backward()
        found.append(torch.allclose(y, wanted, atol=1e-5) and all(each.grad is not None for each in layer.parameters()))
    with pytest.raises(InputError, match="inner size of 3"):
        moe.ExpertsMlp((4, 8, 3))
    return found


def test_the_module_is_the_function_and_its_shared_expert():
    assert run_ranks(outcomes, 2) == [[True] * 4] * 2

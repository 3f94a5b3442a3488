"""Decoding with a static cache on CPU ranks: the tokens of one process that keeps nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from campaigns.torch import generated
from campaigns.torch.generated import PROMPT, Decoder
from campaigns.torch.small_llama import Llama, Sizes, plan
from tests.ranks import run_ranks


def both(count: int) -> list[list[int]]:
    """For `run_ranks`: tokens by all ranks with a cache, and by one process that computes every position again."""
    sizes = Sizes(vocabulary=128, layers=2)
    torch.manual_seed(0)
    single = Llama(sizes)
    model = copy.deepcopy(single)
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan(sizes.layers, sequence=False))
    before, generated.TOKENS = generated.TOKENS, count
    try:
        found = Decoder(model, sizes, dist.get_world_size()).tokens(in_graph=False)
    finally:
        generated.TOKENS = before
    wanted = [*PROMPT]
    with torch.no_grad():
        for _ in range(count):
            wanted.append(int(single(torch.tensor([wanted]))[0, -1].argmax()))
    return [found, wanted[len(PROMPT) :]]


@pytest.mark.slow
def test_tokens_with_a_cache_are_those_without():
    for found, wanted in run_ranks(both, 2, 8):
        assert found == wanted
        assert len({*found}) > 1

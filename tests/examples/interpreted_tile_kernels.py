"""The kernels of examples/tile_kernels between processes, against plain torch, bit for bit where sums are exact.

Run by test_tile_kernels.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from campaigns.exact.gpu_tile_kernels import Sizes, attention_trial, experts_trial, ring_trial  # noqa: E402
from campaigns.exact.trials import Trial  # noqa: E402
from examples.tile_kernels.gathered_attention import GatheredAttention  # noqa: E402
from overweave.runtime.host.processes import RanksFailed  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

WORLDS = (2, 3, 4)
CALLS = 3  # later ones find the memory as the first one left it
# How small ones are made, and launched.
SMALL: dict[Callable[..., Trial], tuple[dict[str, Any], dict[str, Any]]] = {
    ring_trial: ({"block": (16, 16), "moved": (8, 32), "ring": 2}, {"block_k": 16}),
    experts_trial: ({"block": 16, "moved": (4, 16)}, {"block_k": 16, "pull": 2}),
    attention_trial: ({"dtype": torch.float32}, {"blocks": (16, 16)}),
}
EVEN = {ring_trial: (48, 24, 16), experts_trial: (24, 2, 4, 16, 24), attention_trial: (48, 2, 16)}
RAGGED = {ring_trial: (45, 24, 16), experts_trial: (22, 2, 5, 24, 16), attention_trial: (45, 2, 16)}


def wrong(kernel: Callable[..., Trial], sizes: Sizes) -> list[int]:
    """Which calls are wrong on this rank."""
    trial = kernel(sizes, *SMALL[kernel])
    made = [(call, trial.inputs(call)) for call in range(CALLS)]
    return [call for call, given in made if trial.differs(trial.run(given), trial.exact(call, given))]


@pytest.mark.parametrize(("kernel", "sizes"), EVEN.items())
def test_kernel_on_two_ranks(kernel: Callable[..., Trial], sizes: Sizes):
    assert run_ranks(wrong, 2, kernel, sizes) == [[]] * 2


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(("kernel", "sizes"), RAGGED.items())
def test_kernel_whose_shards_and_tiles_are_short(ranks: int, kernel: Callable[..., Trial], sizes: Sizes):
    assert run_ranks(wrong, ranks, kernel, sizes) == [[]] * ranks


def missing_peer(rank: int) -> bool:
    """The last rank makes the operator and then does nothing."""
    operator = GatheredAttention((32, 2, 16), torch.float32)
    q = torch.ones(16, 2, 16)
    if dist.get_rank() != rank:
        operator(q, q, q, blocks=(16, 16))
    else:
        time.sleep(8)
    return True


def test_a_peer_that_does_not_come_is_a_typed_error():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(missing_peer, 2, 1, group_timeout_s=2)
    assert raised.value.outcomes[0].error == "PeerTimeout"

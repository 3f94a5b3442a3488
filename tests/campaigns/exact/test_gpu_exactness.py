"""What the campaign does to GPUs that it sets apart: no GPU is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

peer_access = pytest.importorskip("overweave.memory.cuda.heap", reason="no CUDA bindings here")
from campaigns.exact import gpu_exactness  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402


def agreed() -> list[bool]:
    """What ranks that share a GPU agree on, set apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU"))
        patch.setattr(peer_access, "can_access_peers", peer_access.can_access_peers)  # put back behind the test
        gpu_exactness.part_gpus()
        return [peer_access.group_has_peer_access(resolve(None), torch.device("cuda", 0))]


def test_ranks_that_share_a_gpu_are_set_apart_too():
    assert run_ranks(agreed, 2) == [[False]] * 2

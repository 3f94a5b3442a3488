"""Whether a GPU reads and writes the memory of the others."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def has_peer_access(device: torch.device) -> bool:
    """Whether a GPU reaches every other one that this process sees, and they reach it. Of one GPU nothing is known, and
    yes is said.

    All ranks of a group must find the same: ranks of one island, which see GPUs of another one, all find no.
    """
    own = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != own)
    reach = torch.cuda.can_device_access_peer
    return all(reach(own, other) and reach(other, own) for other in others)

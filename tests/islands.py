"""Ranks of one machine that are told to lie on several islands, and can map no memory between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from overweave.memory.board.records import ISLAND


def on_islands(names: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a rank returns once it has the name of its island: that letter of `names`."""
    os.environ[ISLAND] = names[dist.get_rank()]
    return function(*arguments)

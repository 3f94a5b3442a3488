"""The head of every call on a GPU, bound to a slot, and the words that kernels of a workspace share."""

from __future__ import annotations

import torch

from overweave.memory.cuda.workspace import Slot, Workspace
from overweave.memory.layout import SIGNAL_STRIDE_WORDS
from overweave.runtime.gpu.kernels.kernels import Launch, begin_launch


def words_of(workspace: Workspace) -> torch.Tensor:
    """The own abort word, and what each rank has completed: int32."""
    return workspace.words.view(0, (workspace.words.tensor.numel() // 4,), torch.int32)


def head_of(workspace: Workspace, slot: Slot, signals: int) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """The head of calls in a slot of so many signals; these, int32; and the workspace's words."""
    group, words = workspace.group, words_of(workspace)
    own = slot.view(0, (max(signals, 1) * SIGNAL_STRIDE_WORDS,), torch.int32)
    arrays = [workspace.state, own, workspace.claims, words, workspace.limits]
    return begin_launch(arrays, [signals, group.rank, group.world_size]), own, words

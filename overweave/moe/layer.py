"""A layer of experts as a module: this rank's part of all experts, and a dense one that all tokens share."""

from __future__ import annotations

import torch
from torch import nn

from overweave.errors import InputError
from overweave.memory.group import GroupLike
from overweave.moe.glu import Glu
from overweave.moe.overlapped import ExpertWeights
from overweave.moe.tensor_parallel import experts_mlp
from overweave.ops.dispatch.route import group_rank_of


class ExpertsMlp(nn.Module):
    """`y = shared(x) + sum of topk_weights * down @ act(up @ x)` over the experts of a token, split over ranks.

    experts, hidden, inner: of the layer. glu: between the matmuls; None: up is not gated. bias: whether experts have
    biases. shared: a module of this rank's tokens, `[t/W, hidden]` to the same, such as `ow.SwiGluMlp`; None: none.
    plan: as of `experts_mlp`. dtype, device: of the parameters `up [experts, (2) * inner/W, hidden]`, `down [experts,
    hidden, inner/W]`, and `up_bias`, `down_bias`, this rank's part of each, which `reset_parameters` draws.
    Raises InputError for an inner size that ranks do not divide.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        group: GroupLike = None,
        *,
        glu: Glu | None = None,
        bias: bool = False,
        shared: nn.Module | None = None,
        plan: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        (experts, hidden, inner), ranks = sizes, group_rank_of(group).world_size
        if inner % ranks:
            cure = "Choose a multiple of the ranks"
            raise InputError(f"ExpertsMlp over {ranks} ranks", f"experts have an inner size of {inner}", cure)
        part = inner // ranks
        wide = part if glu is None else 2 * part
        self.up = nn.Parameter(torch.empty(experts, wide, hidden, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(experts, hidden, part, dtype=dtype, device=device))
        self.up_bias = nn.Parameter(torch.empty(experts, wide, dtype=dtype, device=device)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden, dtype=dtype, device=device)) if bias else None
        self.group, self.glu, self.shared, self.plan = group, glu, shared, plan
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as nn.Linear does, from this rank's generator; biases are zeros."""
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)
        for each in (self.up_bias, self.down_bias):
            if each is not None:
                nn.init.zeros_(each)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None) -> torch.Tensor:
        """x `[t/W, hidden]`, topk_ids and topk_weights `[t/W, top]`: this rank's tokens. Returns `[t/W, hidden]`."""
        weights = ExpertWeights(self.up, self.down, self.up_bias, self.down_bias, self.glu)
        y = experts_mlp(x, topk_ids, topk_weights, weights, self.group, plan=self.plan)
        return y if self.shared is None else y + self.shared(x)

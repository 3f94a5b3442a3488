"""Megatron-core's token dispatcher by overweave: a token is sent once to each rank that has one of its experts.

    spec = megatron.woven(get_gpt_layer_local_spec(num_experts=8, ...))     # moe_token_dispatcher_type="alltoall"

Megatron's experts, between dispatch and combine, need the number of rows of each expert on the host
(`tokens_per_expert`), so that the host waits for the device once a layer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from overweave import moe
from overweave.adapters.packages import names_of
from overweave.adapters.report import site
from overweave.moe.slots import ordered_sum

with names_of("megatron"):
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.moe import token_dispatcher as stock

EXPERTS = "token dispatch of Megatron"


class TokenDispatcher(stock.MoETokenDispatcher):  # type: ignore[misc]  # Megatron is not installed with it
    """Replaces MoEAlltoAllTokenDispatcher, for experts that are not split over ranks. push: send tokens without reading
    counts on the host, into buffers for the tokens of all ranks; None: by torch's all-to-all, with exact sizes."""

    push: moe.Push | None = None

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self._ids = torch.empty(0, dtype=torch.int64)
        self._dispatched: Any = None
        self._tables: Any = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert Megatron's routing map to expert ids, which `token_dispatch` uses.

        hidden_states: `[..., hidden]`, this rank's tokens. routing_map: bool `[tokens, experts]`, the experts of each
        token. probs: floats of that shape. Returns tokens `[tokens, hidden]` and routing weights `[tokens, topk]`,
        0 for experts that dropped the token.
        """
        self.hidden_shape, topk = hidden_states.shape, self.config.moe_router_topk
        expert_ids = routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :topk]
        has_expert = routing_map.gather(1, expert_ids)
        self._ids = torch.where(has_expert, expert_ids, -1)
        weights = torch.where(has_expert, probs.gather(1, expert_ids), 0.0)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens and routing weights to the ranks of their experts; return those that this rank receives."""
        site(EXPERTS).by_overweave += 1
        experts, max_rows = self.num_local_experts * self.ep_size, None
        if self.push is not None:
            max_rows = self.ep_size * (hidden_states.shape[0] if self.push.tokens is None else self.push.tokens)
        self._dispatched = moe.dispatch(
            hidden_states, self._ids, probs, experts, self.ep_group, most=max_rows, plan=self.push
        )
        x: torch.Tensor = self._dispatched.x
        return x, self._dispatched.topk_weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (received rows sorted by expert, rows of each local expert on the CPU, routing weight of each row)."""
        tables = self._tables = moe.route(self._dispatched.topk_ids, self.num_local_experts)
        counts = tables.counts.cpu().long()
        rows = int(counts.sum())
        weights = probs.flatten().index_select(0, tables.order[:rows])
        return hidden_states.index_select(0, tables.tokens[:rows]), counts, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum each received token's rows, weighted already by the experts, in the order of its expert ids."""
        tables, top = self._tables, self._dispatched.topk_ids.shape[1]
        return ordered_sum(hidden_states, tables.places, tables.offsets, None, top)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send sums back to the tokens' ranks, which add those of all ranks in rank order."""
        dispatched, self._dispatched, self._tables = self._dispatched, None, None
        return moe.combine(hidden_states, dispatched)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restore the shape of the layer's input."""
        return hidden_states.view(self.hidden_shape)


class MoELayer(moe_layer.MoELayer):  # type: ignore[misc]
    """Megatron's MoE layer, with overweave's dispatcher in place of an `alltoall` one."""

    token_dispatcher: Any

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        stock_dispatcher = vars(self)["token_dispatcher"]
        if reason := _obstacle(stock_dispatcher, config):
            site(EXPERTS).by_torch[reason] += 1
            return
        groups = SimpleNamespace(
            ep=stock_dispatcher.ep_group, expt_tp=stock_dispatcher.tp_group, tp_ep=stock_dispatcher.tp_ep_group
        )
        self.token_dispatcher = TokenDispatcher(self.num_local_experts, self.local_expert_indices, config, groups)


def _obstacle(dispatcher: Any, config: Any) -> str:
    """Return why Megatron's dispatcher is kept; empty if it is replaced."""
    if type(dispatcher) is not stock.MoEAlltoAllTokenDispatcher:
        return f"the dispatcher is {type(dispatcher).__name__}"
    if dispatcher.tp_size > 1:
        return "experts are split over a tensor-parallel group, too"
    if dispatcher.shared_experts is not None:
        return "shared experts overlap with the dispatcher's steps"
    if config.moe_pad_expert_input_to_capacity or getattr(config, "moe_router_padding_for_quantization", False):
        return "experts' rows are padded"
    return ""

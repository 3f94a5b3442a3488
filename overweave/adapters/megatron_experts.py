"""Megatron-core's token dispatcher by overweave: a token travels once to each rank that holds one of its experts.

    spec = megatron.woven(get_gpt_layer_local_spec(num_experts=8, ...))     # moe_token_dispatcher_type="alltoall"

Between dispatch and combine Megatron's experts compute, which want to know on the host how many rows each has: so does
`tokens_per_expert` here, and with it every rank's host waits once for each layer.
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
    """In place of MoEAlltoAllTokenDispatcher, for experts that ranks hold whole. push: how tokens are sent without a
    look at counts, at most as many to a rank as all ranks have; None: by the library, as many as there are."""

    push: moe.Push | None = None

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self._ids = torch.empty(0, dtype=torch.int64)
        self._sent: Any = None
        self._routed: Any = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states: `[..., hidden]`, tokens of this rank. routing_map: bool `[tokens, experts]`, which experts a
        token goes to; probs: floats, alike. Returns tokens `[tokens, hidden]` and weights of their experts `[tokens,
        topk]`, 0 where a token that was dropped has fewer."""
        self.hidden_shape, topk = hidden_states.shape, self.config.moe_router_topk
        slots = routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :topk]
        has_expert = routing_map.gather(1, slots)
        self._ids = torch.where(has_expert, slots, -1)
        weights = torch.where(has_expert, probs.gather(1, slots), 0.0)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to the ranks of their experts, with their weights."""
        site(EXPERTS).by_overweave += 1
        experts, most = self.num_local_experts * self.ep_size, None
        if self.push is not None:
            most = self.ep_size * (hidden_states.shape[0] if self.push.tokens is None else self.push.tokens)
        self._sent = moe.dispatch(hidden_states, self._ids, probs, experts, self.ep_group, most=most, plan=self.push)
        x: torch.Tensor = self._sent.x
        return x, self._sent.topk_weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows sorted by this rank's experts, the counts of these on the CPU, and the weights of rows."""
        tables = self._routed = moe.route(self._sent.topk_ids, self.num_local_experts)
        counts = tables.counts.cpu().long()
        rows = int(counts.sum())
        weights = probs.flatten().index_select(0, tables.order[:rows])
        return hidden_states.index_select(0, tables.tokens[:rows]), counts, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rows of each token, which experts have weighed, added in the order in which the router named them."""
        tables, top = self._routed, self._sent.topk_ids.shape[1]
        return ordered_sum(hidden_states, tables.places, tables.offsets, None, top)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Parts back to the owners of tokens, who add them in the order of ranks."""
        sent, self._sent, self._routed = self._sent, None, None
        return moe.combine(hidden_states, sent)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """In the shape in which tokens came."""
        return hidden_states.view(self.hidden_shape)


class MoELayer(moe_layer.MoELayer):  # type: ignore[misc]
    """Megatron's layer of experts, whose `alltoall` dispatcher is overweave's; other dispatchers stay."""

    token_dispatcher: Any

    def __init__(self, config: Any, *given: Any, **options: Any) -> None:
        super().__init__(config, *given, **options)
        theirs = vars(self)["token_dispatcher"]
        if reason := _reason_unsupported(theirs, config):
            site(EXPERTS).by_torch[reason] += 1
            return
        groups = SimpleNamespace(ep=theirs.ep_group, expt_tp=theirs.tp_group, tp_ep=theirs.tp_ep_group)
        self.token_dispatcher = TokenDispatcher(self.num_local_experts, self.local_expert_indices, config, groups)


def _reason_unsupported(dispatcher: Any, config: Any) -> str:
    """Why Megatron's dispatcher stays; empty if it does not."""
    if type(dispatcher) is not stock.MoEAlltoAllTokenDispatcher:
        return f"the dispatcher is {type(dispatcher).__name__}"
    if dispatcher.tp_size > 1:
        return "experts are split over a tensor-parallel group, too"
    if dispatcher.shared_experts is not None:
        return "shared experts overlap with the dispatcher's steps"
    if config.moe_pad_expert_input_to_capacity or getattr(config, "moe_router_padding_for_quantization", False):
        return "experts' rows are padded"
    return ""

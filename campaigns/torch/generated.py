"""Tokens of a Llama with a static cache: what is decoded in a CUDA graph is what is decoded call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from campaigns.exact.calls import captured
from campaigns.torch.small_llama import Llama, Sizes
from overweave.block.llama import Cache

TOKENS, PROMPT = 64, (3, 14, 15, 92)
Step = Callable[[], tuple[torch.Tensor, ...]]


class Decoder:
    """A model's blocks on tensors that stay where they are, as a graph needs them. What the blocks do not hold stays
    outside of it: the embedding and the head, whose sums over ranks a library makes."""

    def __init__(self, model: Llama, sizes: Sizes, ranks: int) -> None:
        like = model.norm.weight.detach()
        kept = (1, sizes.kv_heads // ranks, len(PROMPT) + TOKENS, sizes.of_block.head)
        self._model, self._x = model, like.new_zeros(1, 1, sizes.width)
        self._position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._kept = [(like.new_zeros(kept), like.new_zeros(kept)) for _ in model.blocks]

    def _through(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._model.through(x, [Cache(k, v, positions, is_full=False) for k, v in self._kept])

    def _step(self) -> tuple[torch.Tensor]:
        return (self._through(self._x, self._position),)

    @torch.no_grad()
    def tokens(self, in_graph: bool) -> list[int]:
        """Those behind the prompt, the likeliest ones."""
        device = self._x.device
        prompt = torch.tensor([PROMPT], device=device)
        found = [self._next(self._through(self._model.embed(prompt), torch.arange(len(PROMPT), device=device)))]
        step: Step = self._step
        if in_graph:
            self._position.fill_(len(PROMPT))  # what is written there is written again
            step = captured(self._step)
        for at in range(len(PROMPT), len(PROMPT) + TOKENS - 1):
            self._x.copy_(self._model.embed(torch.tensor([found[-1:]], device=device)))
            self._position.fill_(at)
            found.append(self._next(step()[0]))
        return found

    def _next(self, x: torch.Tensor) -> int:
        return int(self._model.logits(x[:, -1:]).argmax(-1))


def unlike(model: Llama, sizes: Sizes) -> Iterator[str]:
    """Where the tokens of the graph are not those of the calls. model: by a plan, every rank with every row."""
    eager, replayed = (Decoder(model, sizes, dist.get_world_size()).tokens(in_graph) for in_graph in (False, True))
    yield "" if eager == replayed else f"tokens in a graph {replayed}, not {eager}"
    yield "" if len({*eager}) > 1 else f"all tokens are {eager[0]}"

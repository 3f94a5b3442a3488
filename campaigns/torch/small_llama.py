"""A small Llama of the blocks that `overweave bench block` times, and its tensor-parallel plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.functional import cross_entropy

from campaigns.exact.calls import captured
from overweave.block.cases import BlockSizes
from overweave.block.llama import Cache, TransformerBlock, styles


class Sizes(NamedTuple):
    """has_biases: query, key and value have some, as Qwen's have."""

    vocabulary: int = 64
    width: int = 32
    inner: int = 64
    heads: int = 8
    kv_heads: int = 4
    layers: int = 2
    has_biases: bool = False

    @property
    def of_block(self) -> BlockSizes:
        return BlockSizes(self.width, self.inner, self.heads, self.kv_heads)


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(TransformerBlock(sizes.of_block) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for layer in self._biased() if sizes.has_biases else ():
            layer.bias = nn.Parameter(torch.rand(layer.out_features) - 0.5)

    def _biased(self) -> list[Any]:
        return [getattr(block.attention, name) for block in self.blocks for name in "qkv"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: `[batch, S]`. Returns logits."""
        return self.logits(self.through(self.embed(tokens)))

    def through(self, x: torch.Tensor, caches: Sequence[Cache] | None = None) -> torch.Tensor:
        """The blocks alone."""
        for index, block in enumerate(self.blocks):
            x = block(x, caches[index] if caches is not None else None)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """What stands behind the blocks."""
        found: torch.Tensor = self.head(self.norm(x))
        return found


def plan(layers: int, sequence: bool = True) -> dict[str, Any]:
    """The plan of torch's tutorials, with overweave's styles. sequence: ranks share out rows between blocks."""
    whole = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole)}
    for index in range(layers):
        found |= {f"blocks.{index}.{name}": style for name, style in styles(sequence, by_overweave=True).items()}
    if sequence:
        found["norm"] = SequenceParallel(use_local_output=True)
    return found | {"head": ColwiseParallel(input_layouts=whole, output_layouts=Replicate())}


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# Tokens of a Llama with a static cache: what is decoded in a CUDA graph is what is decoded call by call.

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

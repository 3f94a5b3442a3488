"""A small Llama: grouped-query attention with rotary embedding, gated MLP, RMS norms. And its tensor-parallel plans."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import overweave as ow


class Sizes(NamedTuple):
    vocabulary: int = 64
    width: int = 32
    inner: int = 64
    heads: int = 8
    kv_heads: int = 4
    layers: int = 2
    has_biases: bool = False


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        kv = self.head * sizes.kv_heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=sizes.has_biases)
        self.k = nn.Linear(sizes.width, kv, bias=sizes.has_biases)
        self.v = nn.Linear(sizes.width, kv, bias=sizes.has_biases)
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: torch.Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return result


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(hidden_states=self.norm_1(x))
        result: torch.Tensor = x + self.mlp(self.norm_2(x))
        return result


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    positions, indices = (torch.arange(extent, device=x.device) for extent in (x.shape[-2], half))
    angles = positions[:, None] * 100.0 ** -(indices / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def plan(layers: int, sequence: bool = True) -> dict[str, Any]:
    """The plan of torch's tutorials, with overweave's styles. sequence: ranks share out rows between blocks."""
    whole = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole)}
    for index in range(layers):
        block = {
            "attention.q": ow.Colwise(),
            "attention.k": ow.Colwise(),
            "attention.v": ow.Colwise(),
            "attention.o": ow.Rowwise(output_layouts=whole),
            "mlp.gate": ow.Colwise(),
            "mlp.up": ow.Colwise(),
            "mlp.down": ow.Rowwise(output_layouts=whole),
        }
        if sequence:
            block |= {
                "norm_1": SequenceParallel(use_local_output=True),
                "norm_2": SequenceParallel(use_local_output=True),
                "attention": ow.PrepareGather(input_kwarg_layouts={"hidden_states": Shard(1)}),
                "mlp": ow.PrepareGather(input_layouts=Shard(1)),
            }
        found |= {f"blocks.{index}.{name}": style for name, style in block.items()}
    if sequence:
        found["norm"] = SequenceParallel(use_local_output=True)
    return found | {"head": ColwiseParallel(input_layouts=whole, output_layouts=Replicate())}


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

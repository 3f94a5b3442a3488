"""Modules of the table of situations, as one process computes them.

Each hands its input to `between` first: what a situation puts between the boundary of the module and its first matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, sigmoid, silu

WIDTH, INNER, HEADS = 16, 32, 4
Between = Callable[[torch.Tensor], torch.Tensor]


def as_given(x: torch.Tensor) -> torch.Tensor:
    return x


class Situated(nn.Module):
    """columns, rows: the layers that a plan cuts. own: this rank's rows of what is whole, where ranks share out rows of
    the result. between: see above."""

    columns: tuple[str, ...] = ("up",)
    rows: tuple[str, ...] = ("down",)
    of_own_rows: tuple[str, ...] = ("router.weight",)  # weights whose gradient is of this rank's rows of the result
    roughly = False  # ranks round otherwise than one process

    def __init__(self) -> None:
        super().__init__()
        self.between: Between = as_given
        self.own: Between = as_given
        for name in self.columns:
            setattr(self, name, nn.Linear(WIDTH, INNER))
        for name in self.rows:
            setattr(self, name, nn.Linear(INNER, WIDTH))


class Mlp(Situated):
    columns = ("gate", "up")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x)
        return self.down(silu(self.gate(x)) * self.up(x))


class Attention(Situated):
    columns, rows = ("q", "k", "v"), ("o",)
    parts = 1  # of the heads: as many as ranks

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(WIDTH, INNER, bias=False)  # whose gradient would be zero, but for rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x)
        shape = x.shape[0], -1, HEADS // self.parts, INNER // HEADS
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Router(Situated):
    """A reader of the whole input beside the matmuls, as the router of a mixture of experts is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x)
        return self.down(silu(self.up(x))) * self.own(sigmoid(self.router(x)))


class Normed(Situated):
    """A norm, with a weight, between the boundary and the matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.up(self.norm(self.between(x)))))


class Tied(Situated):
    """Two layers that share a weight: `tie` makes it so, again after a plan has cut both."""

    columns = ("one", "other")

    def __init__(self) -> None:
        super().__init__()
        self.tie()

    def tie(self) -> None:
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x)
        return self.down(silu(self.one(x)) * self.other(x))


class Scaled(nn.Linear):
    """A subclass with a forward of its own, as LoRA's and Float8Linear's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3.0


class Subclassed(Situated):
    columns = ("scaled", "plain")

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled(WIDTH, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x)
        return self.down(silu(self.scaled(x)) * self.plain(x))


MODELS: dict[str, type[Situated]] = {
    "mlp": Mlp,
    "attention": Attention,
    "router": Router,
    "normed": Normed,
    "tied": Tied,
    "subclassed": Subclassed,
}


# Modules of the table whose layers are other packages': a linear layer in fp8, and one with adapters of low rank.
# They are there where their packages are: `MODELS` names those.


class Float8(Mlp):
    """Layers of torchao, which cast both factors to fp8."""

    roughly = True  # a rank's scales may be others than those of the whole

    def __init__(self) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        super().__init__()
        convert_to_float8_training(self, config=Float8LinearConfig(emulate=True))


class Lora(Situated):
    """Layers of PEFT, around plain ones. A plan names the layers inside, and leaves those of few columns whole."""

    columns = ("up.base_layer", "up.lora_B.default")
    rows = ("down.base_layer", "down.lora_A.default")
    of_own_rows = ("down.lora_B.default.weight",)

    def __init__(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self.columns, self.rows = ("up",), ("down",)
        super().__init__()
        del self.columns, self.rows
        inject_adapter_in_model(LoraConfig(target_modules=["up", "down"], r=4, init_lora_weights=False), self)
        self.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(self.between(x))))


def _is_there(package: str) -> bool:
    """Whether a package can be imported; a folder that has its name is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


PACKAGES: dict[str, tuple[str, type[Situated]]] = {
    "fp8 of torchao": ("torchao", Float8),
    "LoRA of PEFT": ("peft", Lora),
}
OUTSIDE = {name: made for name, (package, made) in PACKAGES.items() if _is_there(package)}
ALL = {**MODELS, **OUTSIDE}

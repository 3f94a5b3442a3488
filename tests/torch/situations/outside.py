"""Modules of the table whose layers are other packages': a linear layer in fp8, and one with adapters of low rank.

They are there where their packages are: `MODELS` names those.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from tests.torch.situations.models import MODELS, Mlp, Situated


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

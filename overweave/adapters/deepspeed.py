"""DeepSpeed's row-parallel layers with the sum over ranks beside the matmul: `register()`, before or after a model is
made.

    from overweave.adapters import deepspeed as woven
    woven.register()
    engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 8}, replace_with_kernel_inject=False)

AutoTP puts a `LinearAllreduce` in the place of each row-parallel `nn.Linear`, for inference and for training; its
forward is replaced. Weights, their partition and checkpoints stay DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.adapters.forwards import ReplacedForward, is_dense
from overweave.adapters.versions import names_of
from overweave.functional import linear_all_reduce

with names_of("deepspeed"):
    from deepspeed.module_inject.layers import LinearAllreduce


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """The product, summed over ranks. DeepSpeed's own where a compiler is to sum, or ranks have unlike widths."""
    is_shared = self.is_tp_parallel and not self.defer_collectives_to_compiler
    if not (is_shared and len(set(self._partition_sizes)) == 1 and is_dense(input, self.weight)):
        result: torch.Tensor = _REPLACED.original(self, input)
        return result
    y: torch.Tensor = linear_all_reduce(input, self.weight, self.bias, self.mp_group)
    return y


_REPLACED = ReplacedForward(LinearAllreduce, _forward)


def register() -> None:
    """From now on overweave answers `LinearAllreduce.forward`. Raises InputError where it does already."""
    _REPLACED.register()


def unregister() -> None:
    """DeepSpeed's forward answers again. Raises InputError where overweave's does not answer."""
    _REPLACED.unregister()

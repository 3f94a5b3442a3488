"""DeepSpeed's row-parallel layers with an overlapped sum over ranks: `register()`, before or after a model is built.

    from overweave.adapters import deepspeed as woven
    woven.register()
    engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 8}, replace_with_kernel_inject=False)

AutoTP replaces each row-parallel `nn.Linear` by a `LinearAllreduce`, for inference and for training; `register`
replaces its forward. Weights, their partition and checkpoints stay DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.adapters.packages import ReplacedForward, is_dense, names_of
from overweave.functional import linear_all_reduce

with names_of("deepspeed"):
    from deepspeed.module_inject.layers import LinearAllreduce


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Return the product summed over ranks; by DeepSpeed if a compiler does the sum, or shards differ in width."""
    is_sharded = self.is_tp_parallel and not self.defer_collectives_to_compiler
    if not (is_sharded and len(set(self._partition_sizes)) == 1 and is_dense(input, self.weight)):
        result: torch.Tensor = _REPLACED.original(self, input)
        return result
    y: torch.Tensor = linear_all_reduce(input, self.weight, self.bias, self.mp_group)
    return y


_REPLACED = ReplacedForward(LinearAllreduce, _forward)


def register() -> None:
    """Replace `LinearAllreduce.forward` by overweave's. Raises InputError if it is replaced already."""
    _REPLACED.register()


def unregister() -> None:
    """Restore DeepSpeed's forward. Raises InputError if overweave's is not in place."""
    _REPLACED.unregister()

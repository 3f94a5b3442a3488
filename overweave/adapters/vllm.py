"""vLLM's row-parallel layers with an overlapped sum over ranks.

    OVERWEAVE_INSTALL=1 vllm serve ... --tensor-parallel-size 8

vLLM calls `plugin` in each of its processes, by the entry point `vllm.general_plugins`, which, if OVERWEAVE_INSTALL is
set, replaces `RowParallelLinear.forward`. A program that builds its own engine calls `register()` before. vLLM itself
runs layers that are quantized, or whose all-reduce is deferred.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.adapters.packages import ReplacedForward, is_dense, names_of
from overweave.functional import linear_all_reduce

with names_of("vllm"):
    from vllm import envs
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    envs.VLLM_BATCH_INVARIANT  # noqa: B018 - read at each call


def _forward(self: Any, input_: torch.Tensor) -> Any:
    """Return what vLLM's forward does: the sum, and the bias if another layer adds it."""
    if not (_is_summed(self) and is_dense(input_, self.weight)):
        return _REPLACED.original(self, input_)
    bias = None if self.skip_bias_add else self.bias
    y = linear_all_reduce(input_, self.weight.data, bias, get_tp_group().device_group)
    if not self.return_bias:
        return y
    return y, self.bias if self.skip_bias_add else None


def _is_summed(layer: Any) -> bool:
    """Whether a layer has unquantized weights and all-reduces its result itself."""
    is_plain = type(layer.quant_method) is UnquantizedLinearMethod and not envs.VLLM_BATCH_INVARIANT
    return is_plain and layer.reduce_results and layer.input_is_parallel and layer.tp_size > 1


_REPLACED = ReplacedForward(RowParallelLinear, _forward)


def register() -> None:
    """Replace `RowParallelLinear.forward` by overweave's. Raises InputError if it is replaced already."""
    _REPLACED.register()


def unregister() -> None:
    """Restore vLLM's forward. Raises InputError if overweave's is not in place."""
    _REPLACED.unregister()


def plugin() -> None:
    """Register once: vLLM calls plugins more than once in some processes."""
    if not _REPLACED.is_registered:
        register()

"""What of a process has changed after each thing that overweave does in it.

python -m tests.effects.no_side_effects THING

Prints a line for each change, and nothing where there is none. `calls` and `gpu_calls` run as ranks of torchrun.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.tensor.parallel

from overweave.errors import MachineError

# Adapters of packages that are not here, and the command line, which has a process of its own.
ADAPTERS = ("deepspeed", "megatron", "torchtitan", "transformers", "vllm")
LEFT_OUT = (*(f"overweave.adapters.{name}" for name in ADAPTERS), "overweave.cli")
CONFIGS = ("torch._dynamo.config", "torch._inductor.config")  # which import triton
# Of torch's own settings, what a module of it does not say by a function without arguments.
SAID_BY_TORCH = (
    "get_default_dtype", "get_default_device", "get_float32_matmul_precision", "get_num_threads", "is_grad_enabled",
    "are_deterministic_algorithms_enabled", "is_inference_mode_enabled", "get_num_interop_threads", "initial_seed",
)  # fmt: skip
SAID_BY_C = (
    "_get_cublas_allow_tf32", "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cudnn_allow_tf32",
    "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cudnn_enabled", "_get_cudnn_benchmark",
    "_get_deterministic_algorithms", "_get_flash_sdp_enabled", "_get_math_sdp_enabled", "_is_any_autocast_enabled",
)  # fmt: skip


def state() -> dict[str, object]:
    """Of this process, by name."""
    found: dict[str, object] = {f"os.environ[{name}]": value for name, value in os.environ.items()}
    found |= {f"torch.{name}": getattr(torch, name)() for name in SAID_BY_TORCH}
    found |= {f"torch._C.{name}": getattr(torch._C, name)() for name in SAID_BY_C}
    for config in map(sys.modules.get, CONFIGS):
        if config is not None:
            found |= {f"{config.__name__}.{key}": repr(value) for key, value in config.get_config_copy().items()}
    found |= {f"signal {number}": repr(signal.getsignal(number)) for number in signal.valid_signals()}
    found |= {"warnings.filters": repr(warnings.filters), "sys.path": [*sys.path], "gc": gc.isenabled()}
    found |= {"sys.excepthook": sys.excepthook, "threading.excepthook": threading.excepthook, "cwd": Path.cwd()}
    return found | {"recursion limit": sys.getrecursionlimit(), "umask": _umask(), "thresholds": gc.get_threshold()}


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def import_all() -> None:
    """Every module that a program may import, but for what interprets kernels."""
    package = import_module("overweave")
    for each in pkgutil.walk_packages(package.__path__, "overweave."):
        if not each.name.startswith(LEFT_OUT):
            with suppress(MachineError):
                import_module(each.name)


def interpret() -> None:
    """What runs kernels on CPU ranks."""
    import_module("overweave.runtime.interpreted.interpreter").repair()


def map_memory() -> None:
    """The rendezvous of GPUs, as far as it goes here."""
    heap = import_module("overweave.memory.cuda.heap")
    with suppress(AttributeError, RuntimeError):
        heap.CudaHeap(None, torch.device("cuda", 0), 16)


def first_calls() -> None:
    ow = import_module("overweave")
    x, w = torch.ones(8, 16), torch.ones(16, 8)
    for call in (ow.all_gather_matmul, ow.matmul_reduce_scatter, ow.matmul_all_reduce):
        call(x, w)
        call(x.bfloat16(), w.bfloat16(), plan="sequential")
    ow.check()


def first_calls_on_gpus() -> None:
    """By what is chosen, by kernels of ours, and by torch's."""
    ow = import_module("overweave")
    x, w = torch.ones(256, 128, device="cuda").bfloat16(), torch.ones(128, 256, device="cuda").bfloat16()
    for call, plan in ((ow.all_gather_matmul, "push"), (ow.matmul_reduce_scatter, "scatter")):
        call(x, w)
        call(x, w, plan=plan)
    ow.check()


def install() -> None:
    import_module("overweave").install()


THINGS: dict[str, tuple[Callable[[], None], ...]] = {
    "imports": (import_all, map_memory, install),
    "interprets": (interpret,),
    "calls": (first_calls, install),
    "gpu_calls": (first_calls_on_gpus, install),
}


def changes(things: tuple[Callable[[], None], ...]) -> Iterator[str]:
    """What each thing has changed."""
    before = state()
    for thing in things:
        thing()
        after = state()
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                yield f"{thing.__name__}: {name} was {before.get(name)!r}, is {after.get(name)!r}"
        before = after


def main(name: str) -> None:
    if name == "imports":
        list(map(import_module, CONFIGS))
    if name == "calls":
        dist.init_process_group("gloo")
    if name == "gpu_calls":
        import_module("campaigns.gpu_ranks").join(timedelta(seconds=60))
    for line in changes(THINGS[name]):
        print(line, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

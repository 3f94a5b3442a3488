"""The registry of modules that are imported at their first use, by name.

A machine without a GPU has no CUDA driver to bind to, one without triton no kernels, and no process can hold both the
interpreter and the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from overweave.errors import PACKAGES, KernelUnavailable

BACKENDS = {
    "host library": "overweave.runtime.host.emulate:HostCall",
    "host interpreter": "overweave.runtime.host.interpreted:InterpretedCall",
    "host author": "overweave.runtime.host.authored:HostAuthoredRun",
    "gpu author": "overweave.runtime.gpu.authored:AuthoredRun",
    "host handwritten": "overweave.runtime.host.handwritten:HostHandwrittenRun",
    "host tasks": "overweave.runtime.host.tasks:HostTaskRun",
    "gpu handwritten": "overweave.runtime.gpu.handwritten:HandwrittenRun",
    "gpu workspace": "overweave.memory.cuda.workspace:Workspace",
    "gpu launch": "overweave.runtime.gpu.bound:bind",
    "hopper kernel": "overweave.runtime.kernel_calls.hopper:hopper_call",
    "gpu launch check": "overweave.runtime.gpu.launcher:launch_check",
    "gpu torch": "overweave.runtime.gpu.torch_symm_mem:bind_by_torch",
    "gpu trace": "overweave.runtime.gpu.trace:trace_on_gpu",
    "gpu heap": "overweave.memory.cuda.heap:CudaHeap",
    "gpu reach": "overweave.memory.cuda.heap:group_has_peer_access",
    "gpu grouped": "overweave.runtime.gpu.experts:multiply",
    "gpu grouped into": "overweave.runtime.gpu.experts:multiply_into",
    "gpu grouped arriving": "overweave.runtime.gpu.experts:multiply_arriving",
    "gpu grouped outer": "overweave.runtime.gpu.experts:outer",
    "gpu grouped clear": "overweave.runtime.gpu.experts:clear",
    "gpu quantise": "overweave.runtime.gpu.quantise:quantise_rows",
    "gpu slots": "overweave.runtime.gpu.slots:add_slots",
    "gpu merge": "overweave.runtime.gpu.merge:merge",
    "gpu routing": "overweave.runtime.gpu.routing:route",
    "gpu choose ranks": "overweave.runtime.gpu.travelling:choose_ranks",
    "gpu place rows": "overweave.runtime.gpu.travelling:place_rows",
    "gpu read metadata": "overweave.runtime.gpu.travelling:read_metadata",
    "rows push": "overweave.runtime.kernel_calls.rows:push_launch",
    "rows land": "overweave.runtime.kernel_calls.rows:land_launch",
    "rows add": "overweave.runtime.kernel_calls.rows:add_launch",
    "gpu scratch": "overweave.memory.cuda.heap:Scratch",
}


def load(backend: str) -> Any:
    """Import and return a back end's class or function.

    Raises KernelUnavailable if a package lacks it, or is missing.
    """
    module, name = BACKENDS[backend].split(":")
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        cure = PACKAGES.get((error.name or "").partition(".")[0], "See `overweave doctor`")
        raise KernelUnavailable(f"load what runs {backend}", str(error), cure) from error

"""The one registry of what is loaded when it is first needed: back ends that a machine may lack, or that weigh much.

A machine without a GPU has no CUDA driver to bind to, one without triton no kernels, and no process may hold both the
interpreter and the compiler. So these modules are named here and imported by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKENDS = {
    "host library": "overweave.runtime.emulate:HostCall",
    "host interpreter": "overweave.runtime.interpreted:InterpretedCall",
    "host author": "overweave.runtime.authored_host:AuthoredRun",
    "gpu author": "overweave.runtime.authored_gpu:AuthoredRun",
    "host handwritten": "overweave.runtime.handwritten_host:HandwrittenRun",
    "gpu handwritten": "overweave.runtime.handwritten_gpu:HandwrittenRun",
    "gpu workspace": "overweave.memory.workspace:Workspace",
    "gpu launch": "overweave.runtime.launch:bind",
    "gpu trace": "overweave.runtime.trace_gpu:trace_on_gpu",
    "gpu heap": "overweave.memory.cuda_heap:CudaHeap",
    "gpu scratch": "overweave.memory.scratch:Scratch",
}


def load(backend: str) -> Any:
    """The class or function that stands for a back end. Raises ImportError where the machine lacks what it needs."""
    module, name = BACKENDS[backend].split(":")
    return getattr(import_module(module), name)

"""What is made in one call and used in later ones bears no mark of the caller's in the first: neither of a mode, nor of
a pool of memory.

Tensors of torch.inference_mode may be written to within it only. Memory of a pool that a capture or Inductor's
cudagraph trees own is theirs to give away: torch ends such a call with an error, or hands the memory to others.

torch redirects to pools by thread, or by the stream that is captured, and which of two redirections holds is another
matter in each of its versions. A thread of its own is subject to none.
SOURCE: c10/cuda/CUDACachingAllocator.cpp, get_pool; torch/_inductor/cudagraph_trees.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch

from overweave.errors import MachineError

_RELAXED, _CURE = 2, "See `overweave doctor`"  # SOURCE: cuda.h, CU_STREAM_CAPTURE_MODE_RELAXED
Params = ParamSpec("Params")
Made = TypeVar("Made")


def lasting(make: Callable[Params, Made]) -> Callable[Params, Made]:
    """A function whose tensors are ordinary ones, outside of all modes and, where a GPU is in use, of all pools.

    Memory is as the function left it when it returns: what it put on streams has ended.
    """

    @wraps(make)
    def made(*given: Params.args, **options: Params.kwargs) -> Made:
        call = partial(make, *given, **options)
        return beside(call, torch.cuda.current_device()) if torch.cuda.is_initialized() else _in_no_mode(call)

    return made


def beside(call: Callable[[], Made], device: int) -> Made:
    """What a function returns or raises in a thread of its own, on this GPU, that no capture and no pool knows.

    An interrupt of the waiting thread is raised in the other one, whose peers may count on it, and then here.
    """
    found: list[Made] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_settled(call, device))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run, name="overweave prepares", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException as error:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(type(error)))
        thread.join()
        raise
    if raised:
        raise raised[0]
    return found[0]


def _settled(call: Callable[[], Made], device: int) -> Made:
    torch.cuda.set_device(device)
    exempt_thread_from_capture()
    made = _in_no_mode(call)
    torch.cuda.current_stream().synchronize()  # the caller's streams are others
    return made


def exempt_thread_from_capture() -> None:
    """This thread's calls neither disturb nor join a capture that another thread has under way. With a GPU."""
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    if status:
        raise MachineError("cuThreadExchangeStreamCaptureMode", f"the CUDA driver answered {status}", _CURE)


def _in_no_mode(call: Callable[[], Made]) -> Made:
    with torch.inference_mode(False), torch.no_grad():
        return call()

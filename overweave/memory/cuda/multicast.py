"""Whether GPUs support NVLink multicast (hardware/multicast.py decides who uses it)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

_SUPPORTED = 132  # SOURCE: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h
_DRIVER = "libcuda.so.1"


@lru_cache
def has_multicast(device: torch.device) -> bool:
    """Return whether a GPU supports multicast objects; False if the driver does not say."""
    index = torch.cuda.current_device() if device.index is None else device.index
    value = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(_DRIVER)
        failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), _SUPPORTED, index)
    except (OSError, AttributeError):
        return False
    return not failed and bool(value.value)

"""A GPU as its driver tells it: what it is, and how it is joined to others.

The links are asked of NVML, which comes with the driver; where it is not there or says nothing, of the CUDA driver.
Containers and virtual machines may hide both: then the links are unknown, and nothing fails.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from overweave.hardware.cards import Gpu
from overweave.hardware.machine import UNKNOWN_LINKS, LinkKind

try:
    from cuda.bindings import driver
except ImportError:  # an extra: without it the driver is not asked
    driver = None

GIB = 1 << 30
LIBRARY = "libnvidia-ml.so.1"
# SOURCE: nvml.h: results, and what nvmlDeviceGetNvLinkRemoteDeviceType tells.
SUCCESS, NO_SUCH_LINK, NOT_SUPPORTED = 0, 2, 3
TO_A_GPU, TO_A_SWITCH = 0, 2
MOST_LINKS = 18  # of a GPU, up to Blackwell


def current_gpu() -> Gpu:
    """What the current CUDA device is."""
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """What a CUDA device is."""
    index = torch.cuda.current_device() if device.index is None else device.index
    told = torch.cuda.get_device_properties(index)
    joined = _joined(index, str(told.uuid))
    memory_gib = round(told.total_memory / GIB, 1)
    return Gpu(told.name, (told.major, told.minor), told.multi_processor_count, memory_gib, joined)


def _joined(index: int, uuid: str) -> LinkKind:
    """What a GPU is joined to others by. That no link is up tells of PCIe only where others are seen: a lone GPU has
    nothing to be joined to, and its links may have been taken away with the others.
    """
    told = joined_by(uuid)
    if told == "pcie" and torch.cuda.device_count() == 1:
        return UNKNOWN_LINKS
    return _by_driver(index) if told == UNKNOWN_LINKS else told


def joined_by(uuid: str) -> LinkKind:
    """What NVML says of a GPU's links; unknown where it says nothing."""
    try:
        library = ctypes.CDLL(LIBRARY)
        if library.nvmlInit_v2() != SUCCESS:
            return UNKNOWN_LINKS
        try:
            return _links_of(library, uuid)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or none with these functions
        return UNKNOWN_LINKS


def _links_of(library: Any, uuid: str) -> LinkKind:
    gpu = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(gpu)) != SUCCESS:
        return UNKNOWN_LINKS
    results, ends = set[int](), set[int]()
    for link in range(MOST_LINKS):
        is_active, end = ctypes.c_uint(0), ctypes.c_uint(255)
        results.add(library.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(is_active)))
        if is_active.value and library.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link, ctypes.byref(end)) == SUCCESS:
            ends.add(end.value)
        elif is_active.value:
            return UNKNOWN_LINKS  # NVLink, but nobody says to what
    if TO_A_SWITCH in ends:
        return "nvswitch"
    if ends:
        return "nvlink" if TO_A_GPU in ends else UNKNOWN_LINKS
    return "pcie" if results <= {SUCCESS, NO_SUCH_LINK, NOT_SUPPORTED} else UNKNOWN_LINKS


def _by_driver(own: int) -> LinkKind:
    """PCIe where no other GPU that the process sees takes atomics, which NVLink carries; else unknown."""
    taken = [_takes_atomics(own, other) for other in range(torch.cuda.device_count()) if other != own]
    return "pcie" if taken and all(each is False for each in taken) else UNKNOWN_LINKS


def _takes_atomics(own: int, other: int) -> bool | None:
    """None where the driver does not say. Numbers are torch's, which are the driver's."""
    if driver is None:
        return None
    wanted = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    status, value = driver.cuDeviceGetP2PAttribute(wanted, own, other)
    return bool(value) if status == driver.CUresult.CUDA_SUCCESS else None

"""What the driver says of a GPU: name, capability, SMs, memory, its links to other GPUs, and NVLink multicast.

NVML, which comes with the driver, tells the links; if it is missing or says nothing, the CUDA driver does. Containers
and virtual machines may hide both: then the links are unknown, and nothing fails.
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
except ImportError:  # an optional dependency
    driver = None

GIB = 1 << 30
LIBRARY = "libnvidia-ml.so.1"
# SOURCE: nvml.h: return codes, and device types of nvmlDeviceGetNvLinkRemoteDeviceType.
SUCCESS, NO_SUCH_LINK, NOT_SUPPORTED = 0, 2, 3
TO_A_GPU, TO_A_SWITCH = 0, 2
MOST_LINKS = 18  # of a GPU, up to Blackwell


def current_gpu() -> Gpu:
    """Describe the current CUDA device."""
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """Describe a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    links = _link_kind(index, str(properties.uuid))
    memory_gib = round(properties.total_memory / GIB, 1)
    return Gpu(
        properties.name, (properties.major, properties.minor), properties.multi_processor_count, memory_gib, links
    )


def _link_kind(index: int, uuid: str) -> LinkKind:
    """Return the links of a GPU. A process that sees one GPU alone cannot conclude PCIe from NVLinks that are down."""
    links = nvml_link_kind(uuid)
    if links == "pcie" and torch.cuda.device_count() == 1:
        return UNKNOWN_LINKS
    return _driver_link_kind(index) if links == UNKNOWN_LINKS else links


def nvml_link_kind(uuid: str) -> LinkKind:
    """Return what NVML says of a GPU's links; unknown if it says nothing."""
    try:
        library = ctypes.CDLL(LIBRARY)
        if library.nvmlInit_v2() != SUCCESS:
            return UNKNOWN_LINKS
        try:
            return _nvml_links(library, uuid)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or none with these functions
        return UNKNOWN_LINKS


def _nvml_links(library: Any, uuid: str) -> LinkKind:
    """Return the links of the GPU with this UUID. library: NVML, initialised."""
    gpu = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(gpu)) != SUCCESS:
        return UNKNOWN_LINKS
    results, remote_types = set[int](), set[int]()
    for link in range(MOST_LINKS):
        is_active, remote_type = ctypes.c_uint(0), ctypes.c_uint(255)
        results.add(library.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(is_active)))
        if (
            is_active.value
            and library.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link, ctypes.byref(remote_type)) == SUCCESS
        ):
            remote_types.add(remote_type.value)
        elif is_active.value:
            return UNKNOWN_LINKS  # an active NVLink with an unknown remote device
    if TO_A_SWITCH in remote_types:
        return "nvswitch"
    if remote_types:
        return "nvlink" if TO_A_GPU in remote_types else UNKNOWN_LINKS
    return "pcie" if results <= {SUCCESS, NO_SUCH_LINK, NOT_SUPPORTED} else UNKNOWN_LINKS


def _driver_link_kind(own: int) -> LinkKind:
    """Return PCIe if no other GPU that the process sees supports peer atomics, as NVLink does; else unknown."""
    supported = [_supports_atomics(own, other) for other in range(torch.cuda.device_count()) if other != own]
    return "pcie" if supported and all(each is False for each in supported) else UNKNOWN_LINKS


def _supports_atomics(own: int, other: int) -> bool | None:
    """Return whether GPU `own` has native atomics on GPU `other`; None if the driver does not say."""
    if driver is None:
        return None
    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    status, value = driver.cuDeviceGetP2PAttribute(attribute, own, other)
    return bool(value) if status == driver.CUresult.CUDA_SUCCESS else None


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

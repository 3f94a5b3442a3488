"""How GPUs are joined, as drivers that tell all, something, or nothing say it."""

from __future__ import annotations

import ctypes
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from overweave.errors import MachineError
from overweave.hardware.cards import Gpu
from overweave.hardware.multicast import BY_TORCH, WITHOUT
from overweave.memory.cuda import card, heap
from overweave.memory.cuda.card import nvml_link_kind

SWITCH, A_GPU, ABSENT, REFUSED = 2, 0, 2, 4


def library(links: dict[int, int | None], missing: int = ABSENT, handle: int = 0, init: int = 0) -> SimpleNamespace:
    """NVML with active links, each to the end of a kind, or (None) to one that it does not tell."""

    def state(gpu: object, link: int, out: Any) -> int:
        if link not in links:
            return missing
        out._obj.value = 1
        return 0

    def end(gpu: object, link: int, out: Any) -> int:
        if links[link] is None:
            return 3
        out._obj.value = links[link]
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: init,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda uuid, out: handle,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=end,
    )


@pytest.mark.parametrize(
    ("told", "joined"),
    [
        (library(dict.fromkeys(range(18), SWITCH)), "nvswitch"),
        (library(dict.fromkeys(range(12), A_GPU)), "nvlink"),
        (library({}), "pcie"),
        (library({}, missing=3), "pcie"),  # a card without NVLink
        (library({}, missing=REFUSED), "unknown"),
        (library({0: None}), "unknown"),
        (library({0: 255}), "unknown"),
        (library({0: SWITCH}, handle=6), "unknown"),  # a slice of a GPU has another name there
        (library({0: SWITCH}, init=9), "unknown"),
        (SimpleNamespace(), "unknown"),  # none of its functions
    ],
)
def test_links_are_told_or_unknown(told: SimpleNamespace, joined: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: told)
    assert nvml_link_kind("0123") == joined


def test_without_the_library_links_are_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "LIBRARY", "libno-such-library.so.1")
    assert nvml_link_kind("0123") == "unknown"


def gpu_among(gpus: int, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """What the first of so many GPUs that the process sees is found to be."""
    told = SimpleNamespace(uuid="0", name="A", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    card.gpu_of.cache_clear()
    gpu = card.gpu_of(torch.device("cuda", 0))
    card.gpu_of.cache_clear()
    return gpu


@pytest.mark.parametrize(
    ("gpus", "told", "joined"),
    [
        (1, library({}), "unknown"),  # nothing to be joined to: its links may be gone with the others
        (1, library(dict.fromkeys(range(18), SWITCH)), "nvswitch"),
        (1, library({}, missing=REFUSED), "unknown"),
        (2, library({}), "pcie"),
        (2, library(dict.fromkeys(range(18), SWITCH)), "nvswitch"),
    ],
)
def test_a_lone_gpu_without_links_is_known_by_its_name(
    gpus: int, told: SimpleNamespace, joined: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(card, "driver", None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: told)
    assert gpu_among(gpus, monkeypatch).joined == joined


@pytest.mark.parametrize(
    ("answers", "joined"),
    [((0, 0), "pcie"), ((0, 1), "unknown"), ((0, None), "unknown"), ((), "unknown")],
)
def test_the_driver_is_asked_where_nvml_is_silent(
    answers: tuple[int | None, ...], joined: str, monkeypatch: pytest.MonkeyPatch
):
    def asked(wanted: object, own: int, other: int) -> tuple[str, int]:
        answer = answers[other - 1]
        return ("refused", 0) if answer is None else ("success", answer)

    driver = SimpleNamespace(
        CUdevice_P2PAttribute=SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=1),
        CUresult=SimpleNamespace(CUDA_SUCCESS="success"),
        cuDeviceGetP2PAttribute=asked,
    )
    monkeypatch.setattr(card, "driver", driver)
    monkeypatch.setattr(card, "LIBRARY", "libno-such-library.so.1")
    gpu = gpu_among(1 + len(answers), monkeypatch)
    assert (gpu.name, gpu.capability, gpu.sms, gpu.memory_gib, gpu.joined) == ("A", (9, 0), 132, 80.0, joined)


# Whether a GPU has multicast, as the driver tells it.


@pytest.mark.parametrize(("answer", "value", "has"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_the_driver_says(monkeypatch: pytest.MonkeyPatch, answer: int, value: int, has: bool):
    asked = []

    def attribute(found, kind: int, index: int) -> int:
        asked.append((kind, index))
        found._obj.value = value
        return answer

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    card.has_multicast.cache_clear()
    assert card.has_multicast(torch.device("cuda", 3)) == has
    assert asked == [(132, 3)]
    card.has_multicast.cache_clear()


def test_without_a_driver_there_is_none():
    card.has_multicast.cache_clear()
    assert not card.has_multicast(torch.device("cuda", 0))


# torch's rendezvous of our memory makes no multicast object, and the environment is as before.

GROUP = SimpleNamespace(name="0", process_group=None, world_size=1)


def mapped(monkeypatch: pytest.MonkeyPatch, rendezvous) -> None:
    monkeypatch.setattr(symmetric_memory, "empty", lambda size, **options: torch.ones(size, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    heap.CudaHeap(GROUP, torch.device("cpu"), 16)


@pytest.mark.parametrize("said", [None, "0", "1"])
def test_torch_is_told_for_the_one_call(monkeypatch: pytest.MonkeyPatch, said: str | None):
    heard = []

    def rendezvous(tensor, group):
        heard.append(os.environ.get(BY_TORCH))
        return SimpleNamespace(buffer_ptrs=(1, 2))

    monkeypatch.delenv(BY_TORCH, raising=False)
    if said is not None:
        monkeypatch.setenv(BY_TORCH, said)
    before = dict(os.environ)
    mapped(monkeypatch, rendezvous)
    assert heard == [WITHOUT[BY_TORCH]]
    assert dict(os.environ) == before


def test_a_rendezvous_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    def rendezvous(tensor, group):
        raise RuntimeError("no peer")

    monkeypatch.delenv(BY_TORCH, raising=False)
    with pytest.raises(MachineError, match="no peer"):
        mapped(monkeypatch, rendezvous)
    assert BY_TORCH not in os.environ


def test_threads_that_meet_several_groups_neither_wait_nor_undo_each_other(monkeypatch: pytest.MonkeyPatch):
    """The first to come is the first to go: the second is told as long as it is under way."""
    monkeypatch.delenv(BY_TORCH, raising=False)
    entered, leave, heard = threading.Barrier(3, timeout=20), [threading.Event(), threading.Event()], []

    def meet(index: int) -> None:
        with heap._unicast():
            entered.wait()
            leave[index].wait(20)
            heard.append(os.environ.get(BY_TORCH))

    threads = [threading.Thread(target=meet, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    for index, thread in enumerate(threads):
        leave[index].set()
        thread.join(20)
    assert heard == [WITHOUT[BY_TORCH]] * 2
    assert BY_TORCH not in os.environ

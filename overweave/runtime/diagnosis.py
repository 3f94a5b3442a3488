"""The checks of `overweave doctor`: what this machine can do, by trying.

A check is data: a name and a probe. A probe returns a finding; one that raises has failed with that error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist

from overweave.compat.versions import numbers, standing, tested
from overweave.errors import PACKAGES, KernelUnavailable, MachineError
from overweave.hardware import multicast
from overweave.memory.board.board import Board
from overweave.memory.board.islands import host_name
from overweave.memory.board.records import ISLAND, island_name
from overweave.memory.cuda.card import has_multicast
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.group import resolve
from overweave.runtime.backends import load
from overweave.runtime.finding import Check, DeviceFinding, Status, installed

OLDEST_PYTHON = (3, 11)
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount, not a file of ours
SMALLEST_SHARED_MEMORY_BYTES = 1 << 30
SYMMETRIC_BYTES = 1 << 20
HOPPER = (9, 0)
MEET_WITHIN = timedelta(seconds=60)


def _python() -> DeviceFinding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return DeviceFinding("failed", found, "Install Python 3.11 or newer")
    return DeviceFinding("ok", found)


def _torch() -> DeviceFinding:
    version = str(torch.__version__)  # of a type of its own, which is no text for JSON
    if standing("torch", version) == "old":
        return DeviceFinding("failed", version, PACKAGES["torch"])
    return DeviceFinding(*_version_status("torch", version))


def _version_status(package: str, version: str) -> tuple[Status, str]:
    """Return a note for a version newer than the newest that was tested: it may work."""
    if standing(package, version) == "new":
        return "note", f"{version}, newer than what was tested ({tested(package)}): it may work"
    return "ok", version


def _triton() -> DeviceFinding:
    """Check Triton: installed, tested with this version, fit for the installed numpy, and not shadowed by another."""
    version, numpy = installed("triton"), installed("numpy")
    if not version:
        return DeviceFinding("note", "not installed: schedules can be shown, proven and simulated, kernels cannot run",
                       "pip install triton==3.6.0 'numpy<2.4'")  # fmt: skip
    if numbers(version) <= (3, 6) and numbers(numpy) >= (2, 4):
        found = f"{version} with numpy {numpy}: its interpreter, which emulated ranks need, breaks there"
        return DeviceFinding("note" if torch.cuda.device_count() else "failed", found, "pip install 'numpy<2.4'")
    if standing("triton", version) == "old":
        found = f"{version}, older than what was tested ({tested('triton')})"
        return DeviceFinding(
            "note", f"{found}: calls whose kernel it cannot make take the library path", PACKAGES["triton"]
        )
    folders = [
        folder for folder in dict.fromkeys(sys.path) if (Path(folder or ".") / "triton" / "__init__.py").is_file()
    ]
    if len(folders) > 1:
        found = f"{version} of {folders[0]}, which hides another in {', '.join(folders[1:])}"
        return DeviceFinding("note", found, "Keep one: the version of one may be told for the code of the other")
    return DeviceFinding(*_version_status("triton", version))


def _kernels() -> DeviceFinding:
    """Compile and load a kernel; check that its launches call Triton's C launcher."""
    try:
        is_quick = load("gpu launch check")(torch.device("cuda", torch.cuda.current_device()))
    except KernelUnavailable as error:
        return DeviceFinding(
            "failed", f"{error.asked}: {error.found}", f"{error.cure}; until then calls take the library path"
        )
    if not is_quick:
        found = "compiled; launched by Triton's own wrapper, since its launcher is none that is known: a slower call"
        return DeviceFinding("note", found, f"Use a Triton from {tested('triton')}")
    return DeviceFinding("ok", "compiled and loaded")


def _libcst() -> DeviceFinding:
    version = installed("libcst")
    if not version:
        return DeviceFinding("note", "not installed: annotated kernels cannot be compiled", PACKAGES["libcst"])
    return DeviceFinding("ok", version)


def driver_version() -> str:
    """Return the version of the NVIDIA driver; empty if there is none, or it does not answer."""
    answer = _query_driver() if shutil.which("nvidia-smi") else None
    return answer.stdout.split("\n")[0] if answer and not answer.returncode else ""


def _query_driver() -> subprocess.CompletedProcess[str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)


def _driver() -> DeviceFinding:
    if shutil.which("nvidia-smi") is None:
        return DeviceFinding("note", "no NVIDIA driver: ranks are emulated on the CPU")
    answer = _query_driver()
    if answer.returncode:
        return DeviceFinding("failed", answer.stdout.strip() or answer.stderr.strip(), "Repair the NVIDIA driver")
    return DeviceFinding("ok", answer.stdout.split("\n")[0])


def reason_without_gpu() -> tuple[str, str]:
    """Return why torch sees no GPU, and what to do."""
    if torch.version.cuda is None:
        cure = "Install the CUDA build of torch (https://pytorch.org names it), or leave the GPUs out"
        return f"torch {torch.__version__} was built without CUDA", cure
    found = f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU"
    return found, "Look at CUDA_VISIBLE_DEVICES, and at what `nvidia-smi` says of the driver"


def _gpus() -> DeviceFinding:
    """List the GPUs that torch sees; fail if there is a driver but torch sees none."""
    count = torch.cuda.device_count()
    if not count and shutil.which("nvidia-smi") is None:
        return DeviceFinding("note", "none")
    if not count:
        return DeviceFinding("failed", *reason_without_gpu())
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    oldest = min(torch.cuda.get_device_capability(index) for index in range(count))
    found = f"{count}: {names}; CUDA {torch.version.cuda}"
    if oldest != HOPPER:
        return DeviceFinding("note", f"{found}; kernels are tested on sm_90a, this is sm_{oldest[0]}{oldest[1]}")
    return DeviceFinding("ok", found)


def _nccl() -> DeviceFinding:
    return DeviceFinding("ok", ".".join(map(str, torch.cuda.nccl.version())))


def _multicast() -> DeviceFinding:
    """Check whether NCCL may use multicast here: shipped measurements are without it."""
    settings = multicast.settings(os.environ)
    if not any(has_multicast(torch.device("cuda", index)) for index in range(torch.cuda.device_count())):
        return DeviceFinding("ok", f"no GPU here has it; {settings}")
    if multicast.is_off(os.environ):
        return DeviceFinding("ok", f"off: {settings}")
    if multicast.nccl_uses_it(multicast.FEWEST_RANKS):
        found = (
            f"NCCL uses it in groups of {multicast.FEWEST_RANKS} and more, for which no table is shipped: {settings}"
        )
        return DeviceFinding(
            "note", found, "`overweave tune` measures here, `overweave calibrate` describes this machine"
        )
    return DeviceFinding("note", f"NCCL goes without it, others may not: {settings}")


def _peer_access() -> DeviceFinding:
    """Check peer access between all pairs of GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        return DeviceFinding("note", "one GPU: nothing to link")
    cut = [(a, b) for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if cut:
        return DeviceFinding("note", f"GPU {cut[0][0]} cannot address GPU {cut[0][1]} ({len(cut)} pairs in all): rows "
                       "move by the library's collectives alone", "Allow peer access in the container, or name GPUs of "
                       "one island in CUDA_VISIBLE_DEVICES")  # fmt: skip
    return DeviceFinding("ok", f"all {count * (count - 1)} pairs")


def _links() -> DeviceFinding:
    """Check for active NVLinks."""
    query = ["nvidia-smi", "nvlink", "--status"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    active = sum("GB/s" in line for line in answer.stdout.splitlines())
    if answer.returncode or not active:
        return DeviceFinding("note", "no active NVLink: copies between GPUs take the slow road")
    return DeviceFinding("ok", f"{active // torch.cuda.device_count()} NVLinks per GPU")


def _cuda_bindings() -> DeviceFinding:
    """Check that cuda-bindings has the CUDA version of torch."""
    version, cuda = installed("cuda-bindings"), torch.version.cuda or "0"
    cure = f"pip install 'cuda-bindings=={cuda.split('.')[0]}.*'"
    if not version:
        return DeviceFinding("failed", "not installed: the copy engine cannot be driven", cure)
    if version.split(".")[0] != cuda.split(".")[0]:
        return DeviceFinding("note", f"{version} beside torch's CUDA {cuda}", cure)
    return DeviceFinding("ok", version)


def _symmetric_memory() -> DeviceFinding:
    """Allocate and map symmetric memory in a group of one."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        CudaHeap(resolve(None), device, SYMMETRIC_BYTES)
    except MachineError as error:
        return DeviceFinding("failed", error.found, "Use a CUDA build of torch 2.10 or newer on one host")
    finally:
        dist.destroy_process_group()
    return DeviceFinding("ok", "a buffer was allocated and mapped")


def _shared_memory() -> DeviceFinding:
    """Check the free space of /dev/shm."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / 2**30:.1f} GiB free in {SHARED_MEMORY}"
    if free < SMALLEST_SHARED_MEMORY_BYTES:
        return DeviceFinding("failed", found, "Give the container more: docker run --shm-size=8g")
    return DeviceFinding("ok", found)


def _islands() -> DeviceFinding:
    """Find which ranks map each other's memory: of torchrun's ranks, where this is one of them."""
    if "RANK" not in os.environ:
        if island_name():
            return DeviceFinding("note", f"{ISLAND}={island_name()}: ranks with other names map none of its memory")
        return DeviceFinding("ok", f"ranks of one user and container on {host_name()} will be one")
    dist.init_process_group("gloo", timeout=MEET_WITHIN)
    try:
        islands = Board.of(resolve(None)).islands
        dist.barrier()  # nobody leaves before all have met
    finally:
        dist.destroy_process_group()
    if islands.is_one:
        return DeviceFinding("ok", str(islands))
    cure = "Plans that address peers run inside an island: keep groups of tensor parallelism there"
    return DeviceFinding("note", f"{islands}: between them a library's collectives alone move rows", cure)


def _process_group() -> DeviceFinding:
    """Check that torch has the gloo backend."""
    if not dist.is_available():
        return DeviceFinding(
            "failed", "this torch was built without torch.distributed", "Install another build of torch"
        )
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    if "gloo" not in backends:
        return DeviceFinding("failed", "no gloo backend", "Install another build of torch")
    return DeviceFinding("ok", ", ".join(backends))


CHECKS: tuple[Check, ...] = (
    Check("python", _python),
    Check("torch", _torch),
    Check("triton", _triton),
    Check("libcst", _libcst),
    Check("process groups", _process_group),
    Check("shared memory", _shared_memory),
    Check("driver", _driver),
    Check("GPUs", _gpus),
    Check("NCCL", _nccl, needs_gpu=True),
    Check("NVLink multicast", _multicast),
    Check("cuda-bindings", _cuda_bindings, needs_gpu=True),
    Check("kernels", _kernels, needs_gpu=True),
    Check("peer access", _peer_access, needs_gpu=True),
    Check("links", _links, needs_gpu=True),
    Check("symmetric memory", _symmetric_memory, needs_gpu=True),
    Check("islands", _islands),
)


def has_gpu() -> bool:
    """Return whether checks that need a GPU are run."""
    return torch.cuda.device_count() > 0

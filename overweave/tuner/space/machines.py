"""The machine for predictions on a GPU: a calibrated file of this machine, else a described one.

`overweave calibrate` writes its file to the user's cache, named after the GPU and its links.
"""

from __future__ import annotations

import atexit
import re
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from overweave.errors import InputError
from overweave.hardware.cards import Gpu, MachineMatch, file_digest, find
from overweave.hardware.machine import decode
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.tuner.caches import cache_folders, read_cached_if_readable, save_file

LARGEST_BYTES = 1 << 20
_AGREED: WeakKeyDictionary[ProcessGroup, dict[Gpu, MachineMatch]] = WeakKeyDictionary()
atexit.register(_AGREED.clear)  # a process group must not outlive the interpreter


def calibrated_path(gpu: Gpu) -> Path:
    """Return the path of a GPU's calibrated file: readable, and different for another card or other links."""
    words = f"{gpu.name} {gpu.sms} {round(gpu.memory_gib)} {gpu.joined}"
    return (
        cache_folders()["overweave"] / "machines" / f"{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')[:96]}.json"
    )


def save_calibrated(gpu: Gpu, data: bytes) -> Path:
    """Save a machine file for later calls. Warns if it cannot be written."""
    path = calibrated_path(gpu)
    save_file(path, lambda: data)
    return path


def machine_of(gpu: Gpu) -> MachineMatch:
    """Return the machine of a GPU. Warns of a calibrated file that is ignored."""
    path = calibrated_path(gpu)
    found = read_cached_if_readable(path, partial(_decode_calibrated, path, gpu), LARGEST_BYTES)
    return found or find(gpu)


def agreed_machine(group: Group, gpu: Gpu) -> MachineMatch:
    """Return the machine that all ranks of a group use: the calibrated file if all have the same one; else a described
    one.

    The first call is collective; later ones return the same. Ranks on unlike GPUs use the machine of the first name, as
    `nearest`. Raises PeerError.
    """
    agreed = _AGREED.setdefault(group.process_group, {})
    if gpu not in agreed:
        agreed[gpu] = machine_of(gpu) if group.world_size == 1 else _agreed(Board.of(group), gpu)
    return agreed[gpu]


def _agreed(board: Board, gpu: Gpu) -> MachineMatch:
    """Return the machine that the ranks agree on by comparing digests. Collective."""
    own, described = machine_of(gpu), find(gpu)
    files = {*board.all_gather_bytes(own.digest.encode())}
    machines = sorted({*board.all_gather_bytes(described.machine.encode())})
    if len(machines) > 1:
        return MachineMatch(machines[0].decode(), "nearest", gpu)
    return own if len(files) == 1 else described


def _decode_calibrated(path: Path, gpu: Gpu, data: bytes) -> MachineMatch:
    """Return the machine of a calibrated file. Raises InputError if it is not a machine, or of another GPU."""
    machine = decode(data, path.name)
    if machine.processor.sms != gpu.sms:
        raise InputError("calibrated machine", f"it has {machine.processor.sms} SMs, the GPU {gpu.sms}", "")
    return MachineMatch(str(path), "calibrated", gpu, file_digest(data))

"""The machine that predictions for a GPU are made on: a calibrated file of this machine first, then a described one.

`overweave calibrate` keeps its file in the user's cache, under the name of the GPU and of what it is joined by.
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
from overweave.tuner.caches import cache_folders, keep_file, recall_if_readable

LARGEST_BYTES = 1 << 20
_AGREED: WeakKeyDictionary[ProcessGroup, dict[Gpu, MachineMatch]] = WeakKeyDictionary()
atexit.register(_AGREED.clear)  # a process group must not outlive the interpreter


def calibrated_path(gpu: Gpu) -> Path:
    """Where the calibrated file of a GPU is kept: readable, and another file for another card or other links."""
    words = f"{gpu.name} {gpu.sms} {round(gpu.memory_gib)} {gpu.joined}"
    return (
        cache_folders()["overweave"] / "machines" / f"{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')[:96]}.json"
    )


def keep_calibrated(gpu: Gpu, data: bytes) -> Path:
    """Keeps a machine file for the calls to come. Warns where it cannot be written."""
    path = calibrated_path(gpu)
    keep_file(path, lambda: data)
    return path


def found_machine(gpu: Gpu) -> MachineMatch:
    """The machine of a GPU. Warns of a calibrated file that is ignored."""
    path = calibrated_path(gpu)
    found = recall_if_readable(path, partial(_calibrated, path, gpu), LARGEST_BYTES)
    return found or find(gpu)


def agreed_machine(group: Group, gpu: Gpu) -> MachineMatch:
    """What all ranks of a group take: the calibrated file, if all have the same one; else a described machine. The
    first call is collective; later ones look nowhere.

    Ranks on unlike GPUs take the machine of the first name, as one that is nearest. Raises PeerError.
    """
    known = _AGREED.setdefault(group.process_group, {})
    if gpu not in known:
        known[gpu] = found_machine(gpu) if group.world_size == 1 else _agreed(Board.of(group), gpu)
    return known[gpu]


def _agreed(board: Board, gpu: Gpu) -> MachineMatch:
    own, described = found_machine(gpu), find(gpu)
    files = {*board.all_gather_bytes(own.digest.encode())}
    machines = sorted({*board.all_gather_bytes(described.machine.encode())})
    if len(machines) > 1:
        return MachineMatch(machines[0].decode(), "nearest", gpu)
    return own if len(files) == 1 else described


def _calibrated(path: Path, gpu: Gpu, data: bytes) -> MachineMatch:
    """Raises InputError for what is no machine, or of another GPU."""
    machine = decode(data, path.name)
    if machine.processor.sms != gpu.sms:
        raise InputError("calibrated machine", f"it has {machine.processor.sms} SMs, the GPU {gpu.sms}", "")
    return MachineMatch(str(path), "calibrated", gpu, file_digest(data))

"""Runs a script on ranks as torchrun does, from one process that has imported what the script will.

python -m tests.scripts RANKS SCRIPT
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch

from overweave.runtime.host.processes import die_with_parent

# What a script imports by words of it: else every rank would, for some seconds.
IMPORTS = {
    "overweave": "overweave.functional",
    "install(": "overweave.adapters.inductor.fusion",
    "parallelize_module": "overweave.adapters.parallel.styles",
}


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in told.items()}


def started(rank: int, ranks: int, port: int, script: str) -> int:
    """The process of a rank."""
    process = os.fork()
    if process:
        return process
    die_with_parent()
    os.environ |= environment_of(rank, ranks, port)
    torch.set_num_threads(1)
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, this rank must not go on as its parent
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(ranks: int, script: str) -> None:
    text = Path(script).read_text()
    for words, module in IMPORTS.items():
        if words in text:
            import_module(module)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for rank in range(ranks):
        started(rank, ranks, port, script)
    for _ in range(ranks):
        if os.wait()[1]:
            os._exit(1)  # the others end with this process


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

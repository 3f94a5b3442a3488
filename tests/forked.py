"""Python programs in processes of their own, forked from one process that has imported torch for all of them.

MEASURED: importing torch and the operators takes 3 to 5 s of a program that runs for as long (two cores, no GPU). What
is asked about a program's own imports, or is sent signals, is started by `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from overweave.runtime.host.processes import die_with_parent
from tests.source_tree import ROOT

IMPORTED = ("torch", "overweave.functional", "torch.distributed.tensor.parallel")  # none of them imports triton
_NUMBER = struct.Struct("i")
_FORKING: list[socket.socket] = []  # the way to the process that forks, once there is one


def run(
    *words: str, cwd: Path | str = ROOT, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *words], capture_output=True, text=True)` gives. Raises TimeoutExpired."""
    asked = json.dumps({"words": words, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        way = _way()
        way.settimeout(timeout)
        socket.send_fds(way, [_NUMBER.pack(len(asked))], [out.fileno(), err.fileno()])
        way.sendall(asked)
        (process,) = _NUMBER.unpack(_received(way, _NUMBER.size))
        try:
            (status,) = _NUMBER.unpack(_received(way, _NUMBER.size))
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            way.settimeout(None)
            _received(way, _NUMBER.size)
            raise subprocess.TimeoutExpired([*words], timeout) from None
        texts = [os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (out, err)]
    return subprocess.CompletedProcess([*words], os.waitstatus_to_exitcode(status), *texts)


def _way() -> socket.socket:
    if not _FORKING:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
        subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        _FORKING.append(ours)
    return _FORKING[0]


def _received(way: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = way.recv(size - len(found))
        if not part:
            raise EOFError("the process that forks is gone")
        found += part
    return found


def _serve(way: socket.socket) -> None:
    """Forks a process for each program until nobody asks any more."""
    while True:
        head, files, _, _ = socket.recv_fds(way, _NUMBER.size, 2)
        if not head:
            return
        asked = json.loads(_received(way, *_NUMBER.unpack(head)))
        process = os.fork()
        if not process:
            way.close()
            _become(asked["words"], asked["cwd"], asked["env"], files)
        for file in files:
            os.close(file)
        way.sendall(_NUMBER.pack(process))
        way.sendall(_NUMBER.pack(os.waitpid(process, 0)[1]))


def _become(words: list[str], cwd: str, env: dict[str, str], files: list[int]) -> NoReturn:
    """Runs a program in this process, which ends with it."""
    die_with_parent()
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    status = 1
    try:
        _run(words, cwd)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it is, the program has failed, and says so as Python does
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(words: list[str], cwd: str) -> None:
    beside = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    match words:
        case ["-m", module, *arguments]:
            sys.path[:0] = [cwd, *beside]
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *arguments]:
            sys.path[:0] = [str(Path(script).parent), *beside]
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    die_with_parent()
    for name in IMPORTED:
        import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))

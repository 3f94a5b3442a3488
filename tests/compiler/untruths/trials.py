"""Trials of authors' kernels in copies of a process that interprets: a copy need not import anything."""

from __future__ import annotations

import os
import select
import signal
import traceback

import msgspec

from overweave.ops.author import trial
from overweave.runtime.host.footprint import run_trial


def try_in_copies() -> None:
    """From now on kernels are tried so, by this process and those that it forks. A trial that does not end fails."""
    trial._run_in_subprocess = _in_a_copy


def _in_a_copy(data: bytes) -> trial._Verdict:
    ours, theirs = os.pipe()
    copy = os.fork()
    if copy == 0:
        try:
            os.write(theirs, run_trial(data))
        except BaseException:  # noqa: BLE001 - whatever it is, this copy must not go on as its parent
            traceback.print_exc()
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read() if select.select([pipe], [], [], 60.0)[0] else b""
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
    return msgspec.json.decode(said, type=trial._Verdict)

"""Holds files from hostile hands against what the command line promises of every file.

`python -m campaigns.hostile_files --fuzzed 20000`. Each file ends within 2 s of the processor and 2 s for each MiB,
within 1 GiB of memory, with exit code 0, 1, 2 or 3, without a traceback, and with JSON where JSON was asked for.
Crafted files get a process each, with the command line as users have it. Fuzzed ones are many to a process, whose
memory is bounded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import process_time

from msgspec import Struct
from typer.testing import CliRunner

from campaigns.hostile.crafted import CRAFTED
from campaigns.hostile.fuzzed import Base, bases, fuzzed
from campaigns.shown import ignore_interrupts, shown
from overweave.cli.main import app

COMMANDS = ("verify", "simulate")
EXIT_CODES = (0, 1, 2, 3)
SECONDS, SECONDS_PER_MIB, BYTES = 2.0, 2.0, 1 << 30
BATCH = 200


class Ended(Struct, frozen=True):
    """How a command ended on a file. seconds: of the processor; peak_bytes: of memory, or 0 where nobody knows."""

    command: str
    file: str
    size_bytes: int
    exit_code: int
    seconds: float
    peak_bytes: int
    stdout: str
    stderr: str

    @property
    def faults(self) -> list[str]:
        """What was promised and not kept."""
        found = [f"exit code {self.exit_code}"] if self.exit_code not in EXIT_CODES else []
        if self.seconds > SECONDS + SECONDS_PER_MIB * self.size_bytes / 2**20:
            found.append(f"{self.seconds:.1f} s")
        if self.peak_bytes > BYTES:
            found.append(f"{self.peak_bytes >> 20} MiB")
        if "Traceback" in self.stderr:
            found.append(f"a traceback: {self.stderr.strip().splitlines()[-1][:160]}")
        try:
            json.loads(self.stdout)
        except ValueError:
            found.append(f"no JSON: {self.stdout[:80]!r}")
        return found


def by_itself(folder: Path, command: str, name: str) -> Ended:
    """A crafted file, with the command line as users have it."""
    file = folder / f"{name}.{command}"
    file.write_bytes(CRAFTED[name]())
    words = [sys.executable, "-m", "overweave.cli.main", command, str(file), "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        limits = partial(resource.setrlimit, resource.RLIMIT_AS, (BYTES, BYTES))
        with subprocess.Popen(words, stdout=out, stderr=err, preexec_fn=limits, text=True, process_group=0) as started:
            _, status, usage = os.wait4(started.pid, 0)
            started.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    size_bytes = file.stat().st_size
    file.unlink()
    seconds, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10
    return Ended(command, name, size_bytes, started.returncode, seconds, peak_bytes, *texts)


def among_others(command: str, name: str, file: Path) -> Ended:
    """A file, read by a command in this process."""
    began = process_time()
    result = CliRunner().invoke(app, [command, str(file), "--json"])
    seconds = process_time() - began
    unexpected = result.exception if not isinstance(result.exception, SystemExit) else None
    stderr = "".join(traceback.format_exception(unexpected)) if unexpected else result.stderr
    return Ended(command, name, file.stat().st_size, result.exit_code, seconds, 0, result.stdout, stderr)


def batch(known: Sequence[Base], seeds: range) -> list[Ended]:
    """Fuzzed files of some seeds, in this process. Every fourth is simulated."""
    ended = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file")
        for seed in seeds:
            file.write_bytes(fuzzed(Random(seed), known))
            ended.append(among_others(COMMANDS[seed % 4 == 0], f"seed {seed}", file))
    return ended


def run_crafted(names: Sequence[str], workers: int) -> Iterator[Ended]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        jobs = [(command, name) for name in names for command in COMMANDS]
        yield from pool.map(lambda job: by_itself(Path(folder), *job), jobs)


def run_fuzzed(count: int, first: int, workers: int) -> Iterator[Ended]:
    batches = [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]
    with get_context("spawn").Pool(workers, _bounded) as pool:
        for ended in pool.imap(partial(batch, bases()), batches):
            yield from ended


def _bounded() -> None:
    ignore_interrupts()
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def main() -> None:
    """Prints every fault, and how the others ended. Ends with 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzzed", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    counts: Counter[tuple[str, str, int]] = Counter()
    slowest: dict[str, Ended] = {}
    faults = 0
    runs = {"crafted": run_crafted(list(CRAFTED), asked.workers)}
    runs["fuzzed"] = run_fuzzed(asked.fuzzed, asked.first, asked.workers)
    each = ((kind, ended) for kind, run in runs.items() for ended in run)
    for kind, ended in shown(each, "files", len(CRAFTED) * len(COMMANDS) + asked.fuzzed, lambda one: one[1].file):
        counts[kind, ended.command, ended.exit_code] += 1
        slowest[kind] = max(slowest.get(kind, ended), ended, key=lambda one: one.seconds)
        if ended.faults:
            faults += 1
            print(f"FAULT {ended.command} {ended.file}: {'; '.join(ended.faults)}", flush=True)
    for (kind, command, code), count in sorted(counts.items()):
        print(f"{kind:8} {command:9} exit {code}: {count}")
    for kind, ended in slowest.items():
        print(f"slowest {kind}: {ended.command} {ended.file}, {ended.seconds:.1f} s for {ended.size_bytes} bytes")
    print(f"{faults} faults in {sum(counts.values())} runs of {len(CRAFTED)} crafted and {asked.fuzzed} fuzzed files")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

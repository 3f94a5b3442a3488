"""Holds files from hostile hands against what the command line promises of every file.

`python -m campaigns.hostile_files --fuzzed 20000`. Each file ends within 2 s of the processor and 2 s for each MiB,
within 1 GiB of memory, with exit code 0, 1, 2 or 3, without a traceback, and with JSON where JSON was asked for.
Crafted files get a process each, with the command line as users have it: what importing the command takes is measured
once and left out. Fuzzed ones are many to a process, whose memory is bounded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import process_time

from msgspec import Struct
from typer.testing import CliRunner

from campaigns.hostile import others
from campaigns.hostile.crafted import CRAFTED
from campaigns.hostile.fuzzed import Base, bases, fuzzed, fuzzed_json
from campaigns.hostile.others import FILE
from campaigns.shown import ignore_interrupts, shown
from overweave.cli.main import app
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import fingerprint, path_of

SCHEDULE = "schedule"
COMMANDS = {SCHEDULE: (("verify", FILE, "--json"), ("simulate", FILE, "--json"))} | others.COMMANDS
ALL_CRAFTED = {SCHEDULE: CRAFTED} | others.CRAFTED
# Of eight fuzzed files, how many are of a kind.
SHARES = (SCHEDULE,) * 4 + (others.MACHINE, others.MACHINE, others.TRACE, others.SHAPES)
TABLES_OF_SHAPES = 2  # every second of the last kind is a table
EXIT_CODES = (0, 1, 2, 3)
SECONDS, SECONDS_PER_MIB, BYTES = 2.0, 2.0, 1 << 30
BATCH = 200


class Ended(Struct, frozen=True):
    """How a command ended on a file. seconds: of the processor; peak_bytes: of memory, or 0 where nobody knows."""

    command: str  # its words
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
        if any(not (letter.isprintable() or letter == "\n") for letter in self.stdout + self.stderr):
            found.append("it prints what a terminal obeys")
        try:
            if "--json" in self.command.split():
                json.loads(self.stdout)
        except ValueError:
            found.append(f"no JSON: {self.stdout[:80]!r}")
        return found


def by_itself(folder: Path, kind: str, words: tuple[str, ...], name: str) -> Ended:
    """A crafted file, with the command line as users have it."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        file = _placed(kind, ALL_CRAFTED[kind][name](), Path(own))
        command = [sys.executable, "-m", "overweave.cli.main", *_named(words, file)]
        code, seconds, peak_bytes, out, err = _measured(command, {**os.environ, **_of_cache(Path(own))})
        size_bytes = file.stat().st_size
    return Ended(" ".join(words), name, size_bytes, code, seconds - start_s(words[0]), peak_bytes, out, err)


@cache
def start_s(command: str) -> float:
    """Of the processor, that a command takes until it is imported."""
    return _measured([sys.executable, "-c", f"import overweave.cli.commands.{command}"], dict(os.environ))[1]


def _measured(command: list[str], environment: dict[str, str]) -> tuple[int, float, int, str, str]:
    """Exit code, seconds of the processor, peak bytes and what was printed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        limits = partial(resource.setrlimit, resource.RLIMIT_AS, (BYTES, BYTES))
        with subprocess.Popen(
            command, stdout=out, stderr=err, preexec_fn=limits, text=True, process_group=0, env=environment
        ) as started:
            _, status, usage = os.wait4(started.pid, 0)
            started.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    return started.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, texts[0], texts[1]


def _placed(kind: str, data: bytes, folder: Path) -> Path:
    """The file, where its command finds it: a table lies in the user's cache."""
    if kind == others.TABLE:
        with _environment(_of_cache(folder)):
            file = path_of(fingerprint(Target("cuda"), 4))
        file.parent.mkdir(parents=True, exist_ok=True)
    else:
        file = folder / f"{kind}.json"
    file.write_bytes(data)
    return file


def _named(words: tuple[str, ...], file: Path) -> list[str]:
    return [str(file) if word == FILE else word for word in words]


def _of_cache(folder: Path) -> dict[str, str]:
    return {"OVERWEAVE_CACHE_DIR": str(folder)}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def among_others(words: tuple[str, ...], name: str, file: Path, folder: Path) -> Ended:
    """A file, read by a command in this process. folder: of the user's cache."""
    importlib.import_module(f"overweave.cli.commands.{words[0]}")
    began = process_time()
    with _environment(_of_cache(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a table that is ignored
        result = CliRunner().invoke(app, _named(words, file))
    seconds = process_time() - began
    unexpected = result.exception if not isinstance(result.exception, SystemExit) else None
    stderr = "".join(traceback.format_exception(unexpected)) if unexpected else result.stderr
    return Ended(" ".join(words), name, file.stat().st_size, result.exit_code, seconds, 0, result.stdout, stderr)


Known = tuple[Sequence[Base], dict[str, list[bytes]]]  # schedules, and files of the other kinds


def known_files() -> Known:
    return bases(), others.bases()


def batch(known: Known, seeds: range) -> list[Ended]:
    """Fuzzed files of some seeds, in this process, each by one of the commands of its kind."""
    schedules, rest = known
    ended = []
    for seed in seeds:
        kind, rng = SHARES[seed % len(SHARES)], Random(seed)
        if kind == others.SHAPES and seed // len(SHARES) % TABLES_OF_SHAPES:
            kind = others.TABLE
        data = fuzzed(rng, schedules) if kind == SCHEDULE else fuzzed_json(rng, rest[kind])
        words = COMMANDS[kind][seed // len(SHARES) % len(COMMANDS[kind])]
        with tempfile.TemporaryDirectory() as folder:
            file = _placed(kind, data, Path(folder))
            ended.append(among_others(words, f"seed {seed}", file, Path(folder)))
    return ended


def run_crafted(workers: int) -> Iterator[Ended]:
    jobs = [(kind, words, name) for kind, named in ALL_CRAFTED.items() for name in named for words in COMMANDS[kind]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for command in {words[0] for _, words, _ in jobs}:
            start_s(command)
        yield from pool.map(lambda job: by_itself(Path(folder), *job), jobs)


def run_fuzzed(count: int, first: int, workers: int) -> Iterator[Ended]:
    batches = [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]
    # A batch has a process of its own: what a process keeps in its caches would count against its bound.
    with get_context("spawn").Pool(workers, _bounded, maxtasksperchild=1) as pool:
        for ended in pool.imap(partial(batch, known_files()), batches):
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
    crafted = sum(map(len, ALL_CRAFTED.values()))
    total = sum(len(named) * len(COMMANDS[kind]) for kind, named in ALL_CRAFTED.items()) + asked.fuzzed
    runs = {"crafted": run_crafted(asked.workers)}
    runs["fuzzed"] = run_fuzzed(asked.fuzzed, asked.first, asked.workers)
    each = ((kind, ended) for kind, run in runs.items() for ended in run)
    for kind, ended in shown(each, "files", total, lambda one: one[1].file):
        counts[kind, ended.command.split()[0], ended.exit_code] += 1
        slowest[kind] = max(slowest.get(kind, ended), ended, key=lambda one: one.seconds)
        if ended.faults:
            faults += 1
            print(f"FAULT {ended.command} {ended.file}: {'; '.join(ended.faults)}", flush=True)
    for (kind, command, code), count in sorted(counts.items()):
        print(f"{kind:8} {command:12} exit {code}: {count}")
    for kind, ended in slowest.items():
        print(f"slowest {kind}: {ended.command} {ended.file}, {ended.seconds:.1f} s for {ended.size_bytes} bytes")
    print(f"{faults} faults in {sum(counts.values())} runs of {crafted} crafted and {asked.fuzzed} fuzzed files")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

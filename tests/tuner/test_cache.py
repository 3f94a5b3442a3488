"""Files of measurements: written whole, read with suspicion, and never in the way."""

from __future__ import annotations

import json
import os
import stat
import warnings
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.plan import Problem
from overweave.tuner import cache
from overweave.tuner.cache import decode, fingerprint, keep, knowledge, load, path_of, shipped, write
from overweave.tuner.rank import MACHINES
from overweave.tuner.table import Entry, Table, Time
from overweave.tuner.target import Target

CPU, GPU = Target("cpu"), Target("cuda")
PROBLEM = Problem(operator="all_gather_matmul", m=1024, n=512, k=256, world_size=4, dtype="bfloat16")
ENTRY = Entry(PROBLEM, (Time("push", {"pieces": 2}, 8.0), Time("sequential", {}, 10.5)))
OWN = fingerprint(CPU, 4)
TABLE = Table(fingerprint=OWN, entries=(ENTRY,))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))


def test_what_is_kept_is_known_and_files_are_readable():
    keep((ENTRY,), OWN)
    other = replace(ENTRY, problem=replace(PROBLEM, n=1024))
    path = keep((other,), OWN)
    assert load(path, OWN).entries == (ENTRY, other)
    assert knowledge(CPU, 4).find(PROBLEM).entry == ENTRY
    assert path.name.startswith("cpux4.")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert json.loads(path.read_text())["entries"][0]["times"][0]["options"] == {"pieces": 2}
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing is left of writing


def test_no_cache_is_no_news():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knowledge(CPU, 4).find(PROBLEM) is None


def test_other_software_has_another_file(monkeypatch: pytest.MonkeyPatch):
    path = keep((ENTRY,), OWN)
    monkeypatch.setattr(cache, "_version", lambda package: "9.9")
    assert path_of(fingerprint(CPU, 4)) != path
    assert knowledge(CPU, 4).find(PROBLEM) is None
    assert len({path_of(fingerprint(target, ranks)) for target in (CPU, GPU) for ranks in (2, 4)}) == 4


def encoded(**changes: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(TABLE) | changes)


def with_entry(**changes: object) -> bytes:
    return encoded(entries=[msgspec.to_builtins(ENTRY) | changes])


def with_time(**changes: object) -> bytes:
    return with_entry(times=[msgspec.to_builtins(ENTRY.times[0]) | changes])


BAD = {
    "empty": b"",
    "truncated": encoded()[:-20],
    "not text": b"\xff\xfe\x00",
    "not an object": b"[]",
    "another format": encoded(format=2),
    "unknown key": encoded(run="rm"),
    "deep": b'{"entries": ' + b"[" * 100_000,
    "many entries": encoded(entries=[msgspec.to_builtins(ENTRY)] * 5000),
    "no times": with_entry(times=[]),
    "another number of ranks": with_entry(problem=msgspec.to_builtins(replace(PROBLEM, world_size=2))),
    "no bucket": with_entry(problem=msgspec.to_builtins(replace(PROBLEM, m=1000))),
    "negative rows": with_entry(problem=msgspec.to_builtins(PROBLEM) | {"m": -1}),
    "no such operator": with_entry(problem=msgspec.to_builtins(PROBLEM) | {"operator": "os.system"}),
    "no such plan": with_time(plan="teleport"),
    "a plan of another operator": with_time(plan="scatter", options={}),
    "no such option": with_time(options={"speed": 9}),
    "wild option": with_time(options={"pieces": 1 << 62}),
    "option out of the space": with_time(options={"pieces": 63}),
    "tile that does not fit": with_time(options={"pieces": 2, "block_m": 256, "block_n": 256, "stages": 8}),
    "no time": with_time(us=0.0),
    "not a time": with_time(us="fast"),
    "endless time": encoded().replace(b"8.0", b"1e999"),
    "measured elsewhere": encoded(fingerprint=msgspec.to_builtins(replace(OWN, device="toaster"))),
    "measured by another version": encoded(fingerprint=msgspec.to_builtins(replace(OWN, torch="1.0"))),
    "large": b" " * (5 << 20),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_ignored_aloud_and_written_anew(name: str):
    path = path_of(OWN)
    path.parent.mkdir(parents=True)
    path.write_bytes(BAD[name])
    with pytest.warns(RuntimeWarning, match=path.name):
        assert knowledge(CPU, 4).find(PROBLEM) is None
    with pytest.warns(RuntimeWarning, match="ignored"):
        keep((ENTRY,), OWN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knowledge(CPU, 4).find(PROBLEM).entry == ENTRY


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "endless"])
def test_what_is_no_file_neither_hangs_nor_counts(kind: str):
    path = path_of(OWN)
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert knowledge(CPU, 4).find(PROBLEM) is None


def test_a_folder_that_cannot_be_written_is_told_and_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path / "occupied"))
    with pytest.warns(RuntimeWarning) as told:
        keep((ENTRY,), OWN)
    assert "not written" in str(told[-1].message)


def test_a_writer_that_fails_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch):
    path = keep((ENTRY,), OWN)
    before = path.read_bytes()

    def fail(*anything: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write(path, Table(fingerprint=OWN))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_tables_of_the_package(world_size: int):
    (device,) = MACHINES
    table = shipped(device, world_size)
    assert table.fingerprint.world_size == world_size
    assert {"all_gather_matmul", "matmul_reduce_scatter"} <= {entry.problem.operator for entry in table.entries}
    assert all(any(time.plan == "sequential" for time in entry.times) for entry in table.entries)
    assert all(entry.times[0].us <= 1.01 * min(time.us for time in entry.times) for entry in table.entries)
    assert decode(msgspec.json.encode(table)) == table


def test_no_table_for_what_nobody_measured():
    assert shipped("NVIDIA Unheard", 4) is None
    assert shipped("NVIDIA H200", 3) is None
    with pytest.raises(InputError, match="no table"):
        decode(b"{}")

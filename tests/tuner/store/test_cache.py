"""Files of measurements: written whole, read with suspicion, and never in the way."""

from __future__ import annotations

import json
import os
import stat
import time
import warnings
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.tuner import caches
from overweave.tuner.caches import replace_whole
from overweave.tuner.space.space import candidate, reason_unsupported
from overweave.tuner.space.target import Target
from overweave.tuner.store import cache
from overweave.tuner.store.cache import (
    Entry,
    Table,
    Time,
    decode,
    fingerprint,
    knowledge,
    load,
    path_of,
    save,
    shipped,
    shipped_files,
)
from tests.clock import ends_within, slowness

CPU, GPU = Target("cpu"), Target("cuda")
PROBLEM = Problem(operator="all_gather_matmul", m=1024, n=512, k=256, world_size=4, dtype="bfloat16")
ENTRY = Entry(PROBLEM, (Time("push", {"pieces": 2}, 8.0), Time("sequential", {}, 10.5)))
OWN = fingerprint(CPU, 4)
OTHER = replace(ENTRY, problem=replace(PROBLEM, n=1024))
TABLE = Table(fingerprint=OWN, entries=(ENTRY,))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))


def test_what_is_kept_is_known_and_files_are_readable():
    save((ENTRY,), OWN)
    path = save((OTHER,), OWN)
    assert load(path, OWN).entries == (ENTRY, OTHER)
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
    path = save((ENTRY,), OWN)
    monkeypatch.setattr(cache, "installed", lambda package: "9.9")
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
    "no columns": with_entry(problem=msgspec.to_builtins(PROBLEM) | {"n": 0}),
    "no depth": with_entry(problem=msgspec.to_builtins(PROBLEM) | {"k": 0}),
    "no rows": with_entry(problem=msgspec.to_builtins(PROBLEM) | {"m": 0}),
    "endless depth": encoded().replace(b'"k":256', b'"k":' + b"9" * 400),
    "columns of another sum": with_entry(problem=msgspec.to_builtins(PROBLEM) | {"columns": [8, 8]}),
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
        save((ENTRY,), OWN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knowledge(CPU, 4).find(PROBLEM).entry == ENTRY


def test_a_bad_file_misleads_no_neighbour():
    path = path_of(OWN)
    path.parent.mkdir(parents=True)
    for name in ("no columns", "no depth", "endless depth"):
        path.write_bytes(BAD[name])
        with pytest.warns(RuntimeWarning, match="ignored"):
            assert knowledge(CPU, 4).find(replace(PROBLEM, k=300)) is None


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
    with pytest.warns(RuntimeWarning, match="ignored|is not written"):
        save((ENTRY,), OWN)
    assert path.is_file() == (kind in ("pipe", "endless"))  # what can be told to hold no table gives way to one


def test_a_link_stays_one(tmp_path: Path):
    path, there = path_of(OWN), tmp_path / "there.json"
    path.parent.mkdir(parents=True)
    path.symlink_to(there)
    for entry in (ENTRY, OTHER):
        save((entry,), OWN)
    assert path.is_symlink()
    assert load(there, OWN) == load(path, OWN) == replace(TABLE, entries=(ENTRY, OTHER))


def test_what_cannot_be_read_for_now_is_not_overwritten(monkeypatch: pytest.MonkeyPatch):
    path = save((ENTRY,), OWN)

    def fail(*anything: object) -> int:
        raise PermissionError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.warns(RuntimeWarning, match="cannot be read: not today"):
            assert knowledge(CPU, 4).find(PROBLEM) is None
    with monkeypatch.context() as patch:
        patch.setattr(caches, "read_bytes", fail)
        with pytest.warns(RuntimeWarning, match="is not written: not today"):
            save((OTHER,), OWN)
    assert load(path, OWN) == TABLE


def test_more_than_is_read_is_not_written(monkeypatch: pytest.MonkeyPatch):
    """Or all would be lost at the next look."""
    many = tuple(replace(ENTRY, problem=replace(PROBLEM, n=8 * n)) for n in range(1, 41))
    monkeypatch.setattr(cache, "LARGEST_BYTES", len(caches.encode(replace(TABLE, entries=many))) // 2)
    for entry in many:
        save((entry,), OWN)
    kept = load(path_of(OWN), OWN).entries
    assert 10 < len(kept) < 30
    assert kept == many[-len(kept) :]


@pytest.mark.slow
def test_a_full_cache_is_read_in_time():
    pins = {"kernel": "hopper", "block_m": 128, "block_n": 256, "block_k": 64, "group_m": 16, "stages": 3, "warps": 4}
    times = tuple(Time("push", pins | {"pieces": 2, "split_n": 2}, 8.0 + us) for us in range(12))
    many = tuple(Entry(replace(PROBLEM, n=8 * n), times) for n in range(1, 4097))
    path = save(many, OWN)
    assert cache.LARGEST_BYTES // 2 < path.stat().st_size <= cache.LARGEST_BYTES
    assert knowledge(CPU, 4).find(many[-1].problem) is not None
    ends_within(1.0, lambda: knowledge(CPU, 4).find(many[-1].problem))


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing():
    entries = [[replace(ENTRY, problem=replace(PROBLEM, n=8 * n, k=8 * k)) for n in range(1, 9)] for k in range(1, 5)]
    start = get_context("fork")
    writers = [start.Process(target=_keep_one_by_one, args=(own,)) for own in entries]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    kept = load(path_of(OWN), OWN)
    assert {entry.problem for entry in kept.entries} == {entry.problem for own in entries for entry in own}


def _keep_one_by_one(entries: list[Entry]) -> None:
    for entry in entries:
        save((entry,), OWN)


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_a_whole_file_and_nobody_waits():
    save((ENTRY,), OWN)
    for wait_s in (0.001, 0.003, 0.01, 0.03):
        writer = get_context("fork").Process(target=_keep_for_ever)
        writer.start()
        time.sleep(0.1 + wait_s)
        writer.kill()
        writer.join(10)
        start_s = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save((OTHER,), OWN)
            assert {ENTRY.problem, OTHER.problem} <= {entry.problem for entry in knowledge(CPU, 4).own.entries}
        assert time.monotonic() - start_s < 1.0 * slowness()


def _keep_for_ever() -> None:
    while True:
        save((ENTRY,), OWN)


def test_a_folder_that_cannot_be_written_is_told_and_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path / "occupied"))
    with pytest.warns(RuntimeWarning) as told:
        save((ENTRY,), OWN)
    assert "not written" in str(told[-1].message)


def test_a_writer_that_fails_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch):
    path = save((ENTRY,), OWN)
    before = path.read_bytes()

    def fail(*anything: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_whole(path, caches.encode(Table(fingerprint=OWN)))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_tables_of_the_package(world_size: int):
    table = shipped("NVIDIA H200", world_size)
    assert table.fingerprint.world_size == world_size
    assert {"all_gather_matmul", "matmul_reduce_scatter"} <= {entry.problem.operator for entry in table.entries}
    assert all(any(time.plan == "sequential" for time in entry.times) for entry in table.entries)
    assert all(entry.times[0].us <= 1.01 * min(time.us for time in entry.times) for entry in table.entries)
    assert decode(msgspec.json.encode(table)) == table


@pytest.mark.parametrize("world_size", [2, 4])
def test_tables_forget_what_was_measured_without_packed_messages(world_size: int):
    """Of gathers and scatters: where they can be sent, they are quickest (tests/tuner/test_messages.py)."""
    packed = {"all_gather_matmul": "gather_packed", "matmul_reduce_scatter": "scatter_packed"}
    for entry in shipped(GPU.name, world_size).entries:
        plan = packed.get(entry.problem.operator)
        if plan is not None and not reason_unsupported(entry.problem, GPU, candidate(plan, {})):
            assert plan in [time.plan for time in entry.times], entry.problem


def test_rows_of_one_operator_are_those_of_the_whole_file():
    for data in shipped_files().values():
        whole = decode(data)
        for operator in {entry.problem.operator for entry in whole.entries}:
            rows = tuple(entry for entry in whole.entries if entry.problem.operator == operator)
            assert decode(data, operator).entries == rows
    assert decode(data, "nobody's").entries == ()


def test_no_table_for_what_nobody_measured():
    assert shipped("NVIDIA Unheard", 4) is None
    assert shipped("NVIDIA H200", 3) is None
    with pytest.raises(InputError, match="no table"):
        decode(b"{}")


def test_rows_of_schedules_that_are_gone_are_passed_over():
    gone = Entry(replace(PROBLEM, n=2048), (Time("gather", {"order": "ring"}, 1.0),))
    both = replace(ENTRY, times=(Time("gather_pull", {}, 1.0), *ENTRY.times))
    assert decode(caches.encode(Table(fingerprint=OWN, entries=(gone, both)))).entries == (ENTRY,)

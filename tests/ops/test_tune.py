"""Tuning on emulated ranks: one answer on every rank, kept for the next process, and caches that differ are noticed."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from campaigns.exact.calls import FP8, Case, Form, widths
from overweave.errors import InputError, OverweaveError, RankMismatch
from overweave.ir.problem import Problem
from overweave.memory.group import Group, resolve
from overweave.ops.call import prepared
from overweave.ops.tune import tune_and_learn
from overweave.tuner.measure.timer import Effort
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import Entry, Time, decode, fingerprint, path_of, save
from tests.clock import slowness
from tests.ops.calls import is_right, small_call
from tests.ops.table import fault
from tests.ranks import run_ranks

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
QUICK = Effort(rounds=3, warmup=1, host_calls=0)
CPU = torch.device("cpu")
AT_ONCE_S = 1.0  # the line; groups here have 30 s


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ranks inherit it."""
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))


def problem_of(operator: str, world_size: int, m: int = 48) -> Problem:
    return Problem(operator=operator, m=m, n=24, k=16, world_size=world_size, dtype="float32")


def tuned(operator: str) -> list[Any]:
    """What was found, what is taken from now on, and whether calls around it are right."""
    group = resolve(None)
    call = small_call(operator, 48)
    before = is_right(call)
    result = tune_and_learn(problem_of(operator, group.world_size), group, CPU, QUICK)
    choice = ow.explain(operator, m=48, n=24, k=16, world_size=group.world_size, dtype=torch.float32, device="cpu")
    after = all(is_right(call, turn) for turn in range(1, 4))
    measured = [str(time.candidate) for time in result.entry.times]
    return [str(result.winner), choice.text, choice.source, before and after, measured]


@pytest.mark.slow
@pytest.mark.parametrize("operator", [AG, RS, AR])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_ends_with_one_answer(operator: str, world_size: int):
    told = run_ranks(tuned, world_size, operator)
    assert all(each == told[0] for each in told)
    winner, taken, source, is_right_around, measured = told[0]
    assert (winner, source) == (taken, "cache")
    assert is_right_around
    assert winner in measured
    assert "sequential" in measured
    assert len(measured) >= 4
    path = path_of(fingerprint(Target("cpu"), world_size))
    assert [entry.problem for entry in decode(path.read_bytes()).entries] == [problem_of(operator, world_size)]


def calls_of(group_rows: int) -> str:
    x, w = torch.ones(group_rows // dist.get_world_size(), 16), torch.ones(16, 24)
    y = ow.all_gather_matmul(x, w)
    assert bool((y == 16).all())
    return str(ow.explain(AG, m=group_rows, n=24, k=16, world_size=2, dtype=torch.float32, device="cpu").text)


def write_winner(plan: str) -> Path:
    entry = Entry(problem_of(AG, 2), (Time(plan, {}, 1.0),))
    return save((entry,), fingerprint(Target("cpu"), 2))


@pytest.mark.slow
def test_a_later_process_chooses_by_the_cache():
    write_winner("sequential")
    assert run_ranks(calls_of, 2, 48) == ["sequential"] * 2
    assert run_ranks(calls_of, 2, 44) == ["sequential"] * 2  # the same bucket
    write_winner("per_shard")
    assert run_ranks(calls_of, 2, 48) == ["per_shard"] * 2


def tuned_beside(case: Case, after: str) -> list[Any]:
    """A call with more than a bare product, tuned: what was found, and what explain, a call and a neighbour take."""
    n, asked = (widths(case) if case.form.weights > 1 else case.n), {"k": case.k, "dtype": case.dtype, "device": "cpu"}
    choice = ow.tune(case.operator, m=48, n=n, after=after, **asked)
    told = ow.explain(case.operator, m=case.m, n=n, after=after, world_size=2, **asked)
    right = fault(case, 1)
    taken = prepared.calls_of(resolve(None)).latest().choice
    other = ow.explain(case.operator, m=case.m, n=case.n, world_size=2, **asked)
    return [choice.source, told.source, choice.text, told.text, taken.text, right, other.source]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "form", "after", "other"),
    [  # other: a bare product is near enough to ask it, but for a gate, whose product is twice as wide
        (AG, Form(weights=3), "", "nearest"),
        (AG, Form(gate=True, activation="silu"), "gate+silu", "rule"),
        (AR, Form(norm=True, residual=True), "residual+rms_norm", "nearest"),
        *((operator, Form(scaling="rows"), "", "cache") for operator in (AG, RS, AR)),
        (AG, Form(scaling="rows", gate=True), "gate", "rule"),
        (AG, Form(scaling="rows", weights=3, bias=True, activation="silu"), "bias+silu", "nearest"),
    ],
)
def test_more_than_a_bare_product_is_tuned_explained_and_chosen_alike(
    operator: str, form: Form, after: str, other: str
):
    dtype = FP8 if form.scaling else torch.float32
    case = Case(operator, 44, 144, 32, dtype, bool(form.scaling), form=form)
    first, second = run_ranks(tuned_beside, 2, case, after)
    assert first == second
    tuned_by, explained_by, text, explained, called, fault, bare = first
    assert (tuned_by, explained_by) == ("cache", "cache")
    assert text == explained == called
    assert (fault, bare) == ("", other)


def public(operator: str) -> list[str]:
    choice = ow.tune(operator, m=40, n=24, k=16, dtype=torch.float32)
    return [choice.text, choice.source, str(choice)]


@pytest.mark.slow
def test_the_public_function_rounds_rows_up_to_their_bucket():
    first, second = run_ranks(public, 2, RS)
    assert first == second
    assert first[1] == "cache"
    assert "m=48" in first[2]


def call_with_own_cache(folder: str, kind: str) -> list[Any]:
    """Rank 1 finds another cache than its peers."""
    if dist.get_rank() == 1:
        os.environ["OVERWEAVE_CACHE_DIR"] = folder
    start_s = time.monotonic()
    told: list[Any] = []
    for _ in range(2):  # and again: nothing was half agreed
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ow.all_gather_matmul(
                    torch.ones(24, 16), torch.ones(16, 24), plan="per_shard" if kind == "plan" else None
                )
            told.append(["nothing", ""])
        except OverweaveError as error:
            told.append([type(error).__name__, str(error)])
    return [time.monotonic() - start_s, told]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["none", "other", "partial", "operator", "truncated", "hostile", "plan", "version", "folder"]
)
def test_caches_that_differ_are_an_error_at_once_on_every_rank(tmp_path: Path, kind: str, monkeypatch):
    """Whatever it is that rank 1 has instead; but rows of another operator, and a plan that is named, need no rows."""
    write_winner("sequential")
    wider = Entry(problem_of(AG, 2, m=96), (Time("sequential", {}, 1.0),))
    other_operator = Entry(problem_of(RS, 2), (Time("sequential", {}, 1.0),))
    save((other_operator,) if kind == "operator" else (wider,), fingerprint(Target("cpu"), 2))
    theirs = path_of(fingerprint(Target("cpu"), 2)).read_bytes()
    other = tmp_path / "other"
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(other))
    path = path_of(fingerprint(Target("cpu"), 2))
    if kind == "folder":
        path.mkdir(parents=True)
    elif kind == "version":  # of a torch that is gone, copied over by hand
        path.parent.mkdir(parents=True)
        path.write_bytes(theirs.replace(torch.__version__.encode(), b"1.0"))
    elif kind in ("other", "partial", "operator", "plan"):
        write_winner("per_shard" if kind == "other" else "sequential")
    elif kind != "none":
        path.parent.mkdir(parents=True)
        path.write_bytes(theirs[:-9] if kind == "truncated" else b'{"entries": ' + b"[" * 10_000)
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    for took_s, told in run_ranks(call_with_own_cache, 2, str(other), kind):
        assert took_s < AT_ONCE_S * slowness()
        for error, text in told:
            assert error == ("nothing" if kind in ("operator", "plan") else "RankMismatch")
            alike = (
                "choose one plan on every rank: rank 1 asks for a plan of all_gather_matmul chosen by what was measured"
            )
            assert error == "nothing" or alike in text
            assert error == "nothing" or "or delete " in text


def call_beside_bad_file() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_fine = is_right(small_call(AG, 48))
        group = resolve(None)
        tune_and_learn(problem_of(AG, group.world_size), group, CPU, QUICK)
    return [is_fine, [str(warning.message) for warning in caught]]


@pytest.mark.slow
@pytest.mark.parametrize("content", [b'{"format": 1, "finger', b"\0" * 64, b"[" * 100_000])
def test_a_bad_file_is_ignored_by_all_and_written_anew(content: bytes):
    path = path_of(fingerprint(Target("cpu"), 2))
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for is_fine, told in run_ranks(call_beside_bad_file, 2):
        assert is_fine
        assert any(path.name in text and "ignored" in text for text in told)
    assert decode(path.read_bytes()).entries[0].problem == problem_of(AG, 2)


def tune_different_things() -> list[str]:
    told: list[str] = []
    for m in (48, 96 if dist.get_rank() else 192):
        try:
            told.append(ow.tune(AG, m=m, n=24, k=16, dtype=torch.float32).source)
        except RankMismatch as error:
            told.append(str(error))
    told.append(str(is_right(small_call(AG, 48))))
    return told


@pytest.mark.slow
def test_ranks_that_tune_different_problems_are_told():
    for first, second, last in run_ranks(tune_different_things, 2):
        assert first == "cache"
        assert "m=96" in second
        assert "m=192" in second
        assert last == "True"


def refuse() -> list[str]:
    told = []
    bad: list[dict[str, Any]] = [{"operator": "matmul"}, {"m": 0}, {"k": 1.5}, {"dtype": torch.float64}]
    bad += [{"device": "tpu"}]
    bad += [{"device": "cuda"}] if not torch.cuda.is_available() else []
    for changes in bad:
        with pytest.raises(InputError) as caught:
            ow.tune(**({"operator": AG, "m": 48, "n": 24, "k": 16} | changes))
        told.append(caught.value.found)
    return [*told, str(is_right(small_call(AG, 48)))]


def test_what_is_no_problem_is_refused():
    for *told, last in run_ranks(refuse, 2):
        assert "no such operator" in told[0]
        assert "m=0" in told[1]
        assert "k=1.5" in told[2]
        assert "float64" in told[3]
        assert "no such device" in told[4]
        assert "sees no GPU" in told[-1] or torch.cuda.is_available()
        assert last == "True"


def choose_anew() -> list[Any]:
    """A known call takes what was tuned since; a call by name keeps what it asked for."""
    group = resolve(None)
    told: list[Any] = [is_right(small_call(AG, 48, plan=plan)) for plan in (None, "pull")]
    told.append(_sources(group))
    tune_and_learn(problem_of(AG, group.world_size), group, CPU, QUICK)
    told.append("rule" in _sources(group))
    told += [is_right(small_call(AG, 48, plan=plan), 1) for plan in (None, "pull")]
    return [*told, "cache" in _sources(group)]


def _sources(group: Group) -> list[str]:
    return sorted(
        {call.choice.source for call in prepared.calls_of(group).values() if isinstance(call, prepared.Prepared)}
    )


@pytest.mark.slow
def test_calls_that_are_known_choose_anew_after_tuning():
    assert run_ranks(choose_anew, 2) == [[True, True, ["asked", "rule"], False, True, True, True]] * 2

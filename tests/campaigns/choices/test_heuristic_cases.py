"""The campaigns of FiCCO's choices: on a few cases they hold, and each promise can fail."""

from __future__ import annotations

import pytest

from campaigns.choices import ficco_tables, heuristic_cases
from campaigns.choices.ficco_tables import DROPPED, FINER, synthetic, table_i
from overweave.hardware.machine import load


@pytest.mark.slow
def test_a_few_cases_are_right_and_a_heuristic_that_always_says_the_same_is_not(monkeypatch, capsys):
    machine, cases = load("mi300x8"), synthetic(1, 5, 8)
    assert cases == synthetic(1, 5, 8)
    found = heuristic_cases.judged(cases, machine, "here", lambda each: True)
    assert [each.holds for each in found] == [True, True, None, None]
    assert capsys.readouterr().out.count("loses") == 5
    monkeypatch.setattr(heuristic_cases, "_ours", lambda problem, machine: "per_shard")
    found = heuristic_cases.judged(cases, machine, "here", lambda each: False)
    assert [each.holds for each in found] == [False, False, None, None]


@pytest.mark.slow
def test_the_tables_say_what_the_papers_figures_say_and_a_switch_is_told_as_it_is():
    mesh, switch = load("mi300x8"), load("h200x8")
    cases = [case for case in table_i() if case.name in ("g1", "g6")]
    rows = [ficco_tables.row(case, mesh, 8) for case in cases]
    assert {*ficco_tables.columns(rows[0])} >= {*FINER, *DROPPED, "ideal", "by library", "heuristic"}
    assert all(1 < each.speedup(each.best) < each.ideal for each in rows)
    assert all(each.speedup("per_shard") < 0.4 for each in rows)
    found = ficco_tables.verdicts(rows, mesh)
    assert [each.holds for each in found] == [False, True, None, None]  # two cases are not ten
    assert found[0].found == "2"
    tall = ficco_tables.row(cases[1], switch, 8)
    assert [each.holds for each in ficco_tables.verdicts([tall], switch)] == [None] * 4
    assert tall.speedup("per_shard") > tall.speedup(tall.best)

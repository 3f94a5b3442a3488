"""What the README and CONTRIBUTING name must be there."""

from __future__ import annotations

import re

import pytest

from benchmarks.results_page import CHART, GUARANTEES, PAGE, latest, page, with_evidence
from benchmarks.speedup_chart import bars_of, shown_in
from tests.source_tree import ROOT

PAGES = ("README.md", "CONTRIBUTING.md")
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_make_targets(page):
    named = set(re.findall(r"\bmake ([a-z-]+)\b", (ROOT / page).read_text()))
    assert named
    missing = [target for target in named if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in README
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


def test_results_are_what_the_result_files_say():
    assert with_evidence(GUARANTEES.read_text()) == GUARANTEES.read_text()
    assert page() == PAGE.read_text()
    assert shown_in(CHART) == bars_of(latest())

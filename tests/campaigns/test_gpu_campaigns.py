"""`make gpu-test` runs every GPU campaign that checks something, with options that the campaign has."""

from __future__ import annotations

import pytest

from tests.gpu.test_campaigns import CAMPAIGNS
from tests.source_tree import ROOT

SOURCES = {path.stem: path.read_text() for path in (ROOT / "campaigns").glob("gpu_*.py")}

MEASURING = {"gpu_pushes", "gpu_reduction"}  # they look at their data only so that their times mean something


def test_every_campaign_that_ends_with_a_verdict_has_a_short_run():
    judging = {name for name, source in SOURCES.items() if "report.finish()" in source}
    assert {module for module, *_ in CAMPAIGNS.values()} == judging - MEASURING


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_its_options_are_there(name):
    module, *options = CAMPAIGNS[name]
    missing = [word for word in options if word.startswith("--") and f'"{word}"' not in SOURCES[module]]
    assert missing == []

"""Every Python block of the README and the documentation runs as it stands, and prints what the page says."""

from __future__ import annotations

import os

import pytest

from tests import forked
from tests.docs.blocks import Block, blocks
from tests.source_tree import python_path

RANKS = "4"
AS_TORCHRUN = ("-m", "tests.scripts", RANKS)  # does, in a third of the time


def run(block: Block, folder) -> str:
    script = folder / "block.py"
    script.write_text(block.code)
    command = [*(AS_TORCHRUN if block.has_ranks else ()), str(script)]
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = forked.run(*command, timeout=240, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_pages_have_blocks():
    assert {block.page.name for block in blocks()} >= {"README.md", "quickstart.md", "schedule-and-plan.md"}


def marked(block: Block):
    """Blocks that a compiler reads take a minute on four ranks."""
    return pytest.param(block, marks=pytest.mark.nightly if "torch.compile(" in block.code else (), id=str(block))


@pytest.mark.slow
@pytest.mark.parametrize("block", [marked(block) for block in blocks()])
def test_block_prints_what_the_page_says(block, tmp_path):
    printed = run(block, tmp_path)
    assert block.prints is not None, "say on the page what the block prints"
    assert printed.strip() == block.prints.strip()

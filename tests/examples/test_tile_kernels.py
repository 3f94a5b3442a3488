"""The kernels of TileLink, section 5: right on ranks, short, accepted by the lint, and refused without any one wait."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest
import triton

from campaigns.lint.lint_all import report
from campaigns.lint.lint_tile_kernels import cases
from overweave.compiler.emit.emit import load_generated
from tests import forked
from tests.source_tree import ROOT
from tests.test_size import functions, is_device
from tools.aot import compile_kernel
from tools.ptx_lint.lint import lint

KERNELS = sorted((ROOT / "examples" / "tile_kernels").glob("*.py"))
MOST_LINES = 60


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_a_kernel_is_short(file: Path):
    (kernel,) = (function for function in functions(file) if is_device(function))
    first = min(decorator.lineno for decorator in kernel.decorator_list)
    assert (kernel.end_lineno or 0) - first < MOST_LINES


@pytest.mark.slow
@pytest.mark.parametrize("part", ["1/8", *(pytest.param(f"{k}/8", marks=pytest.mark.nightly) for k in range(2, 9))])
def test_kernels_on_ranks(part: str):
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--part={part}"]
    command.append("tests/examples/interpreted_tile_kernels.py")
    ran = forked.run(*command, timeout=290)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "count"), [(6, 2), pytest.param(1, 12, marks=pytest.mark.nightly)])
def test_every_kernel_passes_the_lint(every: int, count: int, capsys: pytest.CaptureFixture[str]):
    """Short: every sixth."""
    assert report(islice(cases(), 0, None, every)) == 0
    assert (
        f"{count} kernels compiled for sm_90a with Triton {triton.__version__}, 0 findings" in capsys.readouterr().out
    )


RING, EXPERTS, ATTENTION = range(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "change", "rules"),
    [
        (RING, (r"consumer_tile_wait\(partials, tile\)", "1"), {"declared-counts", "guarded-order"}),
        (RING, (r"peer_tile_wait\(ring, tile, above\)", "1"), {"declared-counts", "guarded-order"}),
        (RING, (r"peer_tile_notify\([^)]*\)", "pass"), {"declared-counts", "announced-order"}),
        (RING, (r"producer_tile_notify\([^)]*\)$", "pass"), {"declared-counts", "announced-order"}),
        (EXPERTS, (r"consumer_tile_wait\(ready, [^=]*?\)\)", "1"), {"declared-counts", "guarded-order"}),
        (EXPERTS, (r"consumer_tile_wait\(gathered, tile\)", "1"), {"declared-counts", "guarded-order"}),
        (ATTENTION, (r"consumer_tile_wait\(gathered, shard\)", "1"), {"declared-counts", "guarded-order"}),
        (EXPERTS, (r"( *)( {4}left = tl\.load)", r"\1    consumer_tile_wait(gathered, tile)\n\1\2"), {"wgmma"}),
    ],
)
def test_without_a_line_of_the_protocol_the_lint_refuses(
    tmp_path: Path, case: int, change: tuple[str, str], rules: set[str]
):
    source, contract = list(cases())[case]
    text = Path(source.kernel.fn.__code__.co_filename).read_text()
    broken, count = re.subn(*change, text, flags=re.MULTILINE)
    assert count == 1
    kernel = load_generated(tmp_path, source.name, broken)
    mutant = type(source)(kernel, source.signature, source.constexprs, source.attrs, source.options, source.config)
    assert rules <= {finding.rule for finding in lint(compile_kernel(mutant), contract)}

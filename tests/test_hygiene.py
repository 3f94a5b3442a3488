"""What must never stand in the repository: traces of one machine, and ways to run what a file says."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.source_tree import ROOT, modules, nodes

# Spelled in two halves, so that this file does not mention what it forbids.
MACHINE = re.compile(r"/wo" r"rk/|/ro" r"ot/|/ho" r"me/|/op" r"t/|/tm" r"p/|\bsha" r"red/")
URL = re.compile(r"(?:https?|ftp|file)://([^/\s\"'`)>\]]+)")
KNOWN_HOSTS = re.compile(
    r"(.*\.)?(github\.com|arxiv\.org|apache\.org|pytorch\.org|python\.org|nvidia\.com|perfetto\.dev|triton-lang\.org)$"
)
TEXT = {".py", ".md", ".toml", ".json", ".txt", ".yml", ".yaml", ".cfg", ".sh", ""}
LEFT_OUT = {".git", ".venv", "__pycache__", "build", "dist"}

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "torch.load", "torch.save", "yaml.load"}
LAST_WORDS = {name.split(".")[-1] for name in FORBIDDEN_CALLS}
# These unpickle what a peer sent.
FORBIDDEN_ENDINGS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def repository_files() -> list[Path]:
    """What git tracks or would track; every file where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = listing.stdout.splitlines() if listing.returncode == 0 else []
    paths = [ROOT / name for name in names] or list(ROOT.rglob("*"))
    return [p for p in paths if p.is_file() and p.suffix in TEXT and not LEFT_OUT & set(p.relative_to(ROOT).parts)]


def traces(text: str) -> list[str]:
    """Machine paths, and URLs of hosts that not everybody knows."""
    strange = [host for host in URL.findall(text) if not KNOWN_HOSTS.match(host)]
    return [match.group() for match in MACHINE.finditer(text)] + strange


def test_no_file_names_a_machine_or_a_private_host():
    found = {str(path.relative_to(ROOT)): hits for path in repository_files() if (hits := traces(path.read_text()))}
    assert not found


def test_a_trace_would_be_seen():
    assert traces("see ../sha" + "red/shapes")
    assert traces("--extra-index-url http" + "s://wheels.example.internal/simple")
    assert not traces("https://github.com/pytorch/pytorch and the interpreter's shared memory")


def forbidden(source: Iterable[ast.AST]) -> list[str]:
    found = []
    for node in source:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if last in FORBIDDEN_ENDINGS or (last in LAST_WORDS and ast.unparse(node.func) in FORBIDDEN_CALLS):
                found.append(f"{ast.unparse(node.func)} in line {node.lineno}")
            found += [f"shell in line {node.lineno}" for word in node.keywords if word.arg == "shell"]
    return found


def test_nothing_read_is_ever_executed():
    found = {module: hits for module, path in modules().items() if (hits := forbidden(nodes(path)))}
    assert not found


def test_an_execution_would_be_seen():
    lines = [
        "import pickle",
        "eval(a)",
        "torch.load(f)",
        "dist.all_gather_object(a, b)",
        "subprocess.run(c, shell=True)",
    ]
    assert all(forbidden(ast.walk(ast.parse(line))) for line in lines)
    assert not forbidden(ast.walk(ast.parse("model.eval()")))

"""The hook by which MkDocs adds the pages that are written from the code: the gallery and the commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from docs.writers.commands import commands_page  # noqa: E402
from docs.writers.gallery import gallery_pages  # noqa: E402

REPOSITORY_FILE = re.compile(r"\]\((?:\.\./)+(?!docs/)([\w./-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and their pictures."""
    for path, content in {"reference/commands.md": commands_page(), **gallery_pages(config.extra["drawn"])}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a file of the repository outside `docs/` becomes the file's name: the site does not hold that file."""
    depth = page.file.src_uri.count("/")

    def name_of(link: re.Match[str]) -> str:
        is_outside = link[0].count("../") > depth and (ROOT / link[1]).exists()
        return f"] `{link[1]}`" if is_outside else link[0]

    return re.sub(r"\[([^\]]*)\] `", r"\1 `", REPOSITORY_FILE.sub(name_of, markdown))

"""A hook of MkDocs: the measured results and the changelog, which live elsewhere, become pages of the site.

Links from a page to files outside docs/ are named instead: the site does not have those files.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"measured.md": "bench/RESULTS.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with their links as seen from docs/."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("../docs/", "")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Say where a file lies that is no page."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", markdown)

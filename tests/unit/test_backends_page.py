"""docs/backends.md is what its generator makes of the catalogue, and says it is."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_not_stale():
    made = runpy.run_path(str(ROOT / "tools" / "backends_page.py"))["page"]()
    assert (ROOT / "docs" / "backends.md").read_text(encoding="utf-8") == made, "run python tools/backends_page.py"


def test_every_table_is_whole():
    text = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    widths = [line.count(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert len(widths) > 100
    assert len(set(widths)) == 1

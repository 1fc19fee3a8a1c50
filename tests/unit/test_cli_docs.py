"""docs/check.md shows what the command prints, word for word."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from blocktable.cli import run

PAGE = Path(__file__).parents[2] / "docs" / "check.md"
EXAMPLES = re.findall(r"^    \$ blocktable (.*)\n((?:    .*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_the_page_shows_what_is_printed(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(shlex.split(line))
    assert capsys.readouterr().out == re.sub(r"^    ", "", shown, flags=re.MULTILINE)


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) >= 3
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0

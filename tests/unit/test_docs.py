"""The documentation: what it shows is what happens, every page is reached, every link leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from blocktable import errors
from blocktable.cli import COMMANDS, run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^    \$ blocktable (.*)\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE)
EXAMPLES = [(page.name, *found) for page in PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))]
CLOCK = re.compile(
    r"[\d,]+ µs each here|[\d,]+$", re.MULTILINE
)  # times of this machine: one in a line, or the last column


@pytest.mark.compiled
@pytest.mark.parametrize(("page", "line", "shown"), EXAMPLES)
def test_a_page_shows_what_is_printed(page: str, line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    if words[0] == "simulate" and words[1].endswith(".jsonl"):
        pytest.skip(f"{page}: {words[1]} is no part of the project")
    run(words)
    printed = capsys.readouterr().out
    expected = re.sub(r"^    ", "", shown, flags=re.MULTILINE)
    if words[0] == "simulate":
        printed, expected = CLOCK.sub("T", printed), CLOCK.sub("T", expected)
    assert printed.rstrip() == expected.rstrip()


def test_the_pages_that_should_have_examples_have_some() -> None:
    pages = [page for page, _, _ in EXAMPLES]
    assert pages.count("check.md") >= 3
    assert {"README.md", "index.md", "start.md", "operators.md", "simulate.md"} <= set(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_runs_as_a_test(page: Path) -> None:
    """As a doctest; a page of scripts for another environment is run by the conformance tests."""
    if page.name in ("findings.md", "vllm.md"):
        pytest.skip("run beside the real engine, by make conformance")
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        assert ">>> " in block, block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        if page.parent.name == "docs" and name in ("measured.md", "changelog.md"):
            continue  # made when the site is built
        file = page.parent / name if name else page
        assert file.exists() or not (ROOT / "src").exists(), f"{page.name}: {target}"  # a wheel's tests have no sources
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    site = ROOT / "mkdocs.yml"
    if not site.exists():
        pytest.skip("mkdocs.yml is not here: the tests of a wheel")
    named = set(re.findall(r"[\w-]+\.md", site.read_text(encoding="utf-8")))
    assert {page.name for page in PAGES} - {"README.md"} <= named


def test_every_error_and_every_law_has_its_place() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(errors.__all__)
    laws = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    assert [f"L{n}" for n in range(1, 14)] == re.findall(r"^\| (L\d+) ", laws, re.MULTILINE)


def test_exit_statuses_are_those_of_the_program() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "3", "70", "130", "141"]


def test_the_readme_opens_with_the_launch_and_fits_two_screens() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 100
    assert "9416" in "\n".join(lines[:8])
    assert "docs/images/row.svg" in "\n".join(lines[:14])
    for command in ("check", "simulate"):
        assert command in COMMANDS
        assert f"blocktable {command}" in text

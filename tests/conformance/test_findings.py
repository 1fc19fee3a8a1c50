"""Every script of docs/findings.md prints what stands below it, on the vLLM installed here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.conformance

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n((?: {4}[^\n]*\n)+))?", re.DOTALL)
SETUP = "# setup"  # begins the script that those after it build on, up to the next one that imports for itself

RUNNER = """
import contextlib, io, json, sys
setup, found = "", []
for script in json.load(sys.stdin):
    if script.startswith("# setup"):
        setup = script
        continue
    scope, said = {}, io.StringIO()
    if "import" not in script:
        exec(setup, scope)
    with contextlib.redirect_stdout(said):
        exec(script, scope)
    found.append(said.getvalue())
print("FOUND", json.dumps(found))
"""


def scripts():
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```python") == len(BLOCK.findall(text))
    return [(code, re.sub(r"^ {4}", "", said, flags=re.MULTILINE)) for code, said in BLOCK.findall(text)]


def test_the_scripts_print_what_the_page_says(real):
    real("vllm")
    given = scripts()
    # The one that imports Numba comes last: the others would not start after it.
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([code for code, _ in given]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found == [said for code, said in given if not code.startswith(SETUP)]


def test_each_script_is_ten_lines_or_so():
    for code, _ in scripts():
        assert sum(bool(line.strip()) for line in code.splitlines()) <= (19 if code.startswith(SETUP) else 12)

"""The planted faults of `make mutants` still fit the source; three of them are planted here, from three areas."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))
from faults import FAULTS  # noqa: E402 - data beside the tests

pytestmark = pytest.mark.skipif(not (ROOT / "src").exists(), reason="needs the source, not a wheel")


def test_every_kind_has_faults():
    assert len(FAULTS) >= 60
    assert {fault.kind for fault in FAULTS} == {f"K{n}" for n in range(1, 16)}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.file}")
def test_the_line_is_still_there(fault):
    """One that is gone was rewritten: plant the fault anew in tests/mutants/faults.py, in the words of today."""
    source = (ROOT / "src" / "blocktable" / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    assert fault.new not in ("", fault.old)


def test_two_are_noticed():
    command = [sys.executable, str(ROOT / "tools" / "mutants.py"), "K8", "--every", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("caught") == 2

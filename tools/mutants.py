"""Plant every fault of tests/mutants/faults.py, one at a time, and see the sanitizer and the state machine notice it.

    python tools/mutants.py                 # all; exit 1 unless every one is caught, by the sanitizer with the right law
    python tools/mutants.py K14 --every 3   # those of one kind, every third

Each runs as plain Python from a copy of the source, so that one line is one fault; the checks of one fault are two
processes, at most --seconds each.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from faults import FAULTS, Fault  # noqa: E402 - data beside the tests


def plant(fault: Fault, tree: Path) -> bool:
    """Write the sabotaged file into the copy; return whether the text was there exactly once."""
    source = (ROOT / "src" / "blocktable" / fault.file).read_text(encoding="utf-8")
    if source.count(fault.old) != 1:
        return False
    (tree / "blocktable" / fault.file).write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    return True


def check(tree: Path, how: str, area: str, seconds: int) -> str:
    """Run one check in a process of its own; return what it said last."""
    command = [sys.executable, str(ROOT / "tests" / "mutants" / "notice.py"), how, area]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "BLOCKTABLE_ROOT": str(ROOT),
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and script
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else f"died: {done.stderr.strip().splitlines()[-1:]}"


def main() -> int:
    """Run the chosen faults and print the list with the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="kinds such as K14; all unless given")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth")
    parser.add_argument("--only", choices=("sanitizer", "machine"), help="one of the two checks")
    parser.add_argument("--seconds", type=int, default=240, help="for one check of one fault")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if not given.kinds or fault.kind in given.kinds][:: given.every]
    tree = Path(tempfile.mkdtemp(prefix="mutants"))
    shutil.copytree(ROOT / "src" / "blocktable", tree / "blocktable", ignore=shutil.ignore_patterns("__pycache__"))
    caught = [0, 0]
    started = time.monotonic()
    for fault in chosen:
        if not plant(fault, tree):
            print(f"{fault.kind:4} GONE    the text is not there exactly once: {fault.name}", flush=True)
            continue
        law = machine = "-"
        if given.only != "machine":
            law = check(tree, "sanitizer", fault.area, given.seconds)
        if given.only != "sanitizer":
            machine = check(tree, "machine", fault.area, given.seconds)
        right, noticed = law == "-" or law in fault.laws.split(), machine != "nothing"
        caught[0] += right
        caught[1] += noticed
        verdict = "caught" if right and noticed else "MISSED"
        print(f"{fault.kind:4} {verdict}  sanitizer {law:8} machine {machine[:40]:40} {fault.name}", flush=True)
        shutil.copy(ROOT / "src" / "blocktable" / fault.file, tree / "blocktable" / fault.file)
    shutil.rmtree(tree)
    total = len(chosen)
    print(
        f"{total} faults: the sanitizer names the right law of {caught[0]} ({caught[0] / max(total, 1):.0%}), "
        f"the state machines notice {caught[1]} ({caught[1] / max(total, 1):.0%}); {time.monotonic() - started:.0f} s"
    )
    return int(caught != [total, total])


if __name__ == "__main__":
    sys.exit(main())

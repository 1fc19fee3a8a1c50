"""Fuzz one target by coverage with atheris: python tools/fuzz.py TARGET SECONDS.

Targets are those of tests/fuzz/targets.py. What covers something new is kept in tests/fuzz/corpus/TARGET; an input that
fails is written to ./crash-*, and the exit status is not 0. Runs as plain Python, so that coverage sees the loops.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["NUMBA_DISABLE_JIT"] = "1"

import atheris

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
with atheris.instrument_imports(include=["blocktable"]):
    from targets import TARGETS, seeds


def main() -> None:
    """Run libFuzzer over the corpus, or its own small one where there is none yet."""
    name, seconds = sys.argv[1], sys.argv[2]
    corpus = ROOT / "tests" / "fuzz" / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    begin = Path(tempfile.mkdtemp(prefix="seeds"))
    for number, data in enumerate(seeds(name)):
        (begin / str(number)).write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        "-timeout=20",
        "-max_len=8192",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(begin)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()

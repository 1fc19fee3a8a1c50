"""`backends --installed` against a made-up vLLM: what differs is named and fails, what cannot be compared is said."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from blocktable.contracts import resolve_engine

REGISTRY = """
    import enum

    class AttentionBackendEnum(enum.Enum):
        {members}
        def get_path(self):
            return f"vllm.made_up.{{self.name}}"
"""
BACKENDS = """
    class MultipleOf:
        def __init__(self, base):
            self.base = base

    class Backend:
        heads, major = [], None
        get_name = classmethod(lambda cls: cls.__name__)
        get_supported_head_sizes = classmethod(lambda cls: cls.heads)
        get_supported_kernel_block_sizes = classmethod(lambda cls: cls.sizes)
        supports_compute_capability = classmethod(lambda cls, gpu: cls.major in (None, gpu[0]))

    class TRITON_ATTN(Backend):
        sizes = [MultipleOf({triton})]

    class CUTLASS_MLA(Backend):
        sizes, heads, major = [128], [320, 512, 576], {major}
"""
WIDTH = """
    from math import gcd
    def get_block_table_width(blocks, block_size):
        step = {tokens} // gcd({tokens}, block_size)
        return -(-blocks // step) * step
"""


def ask(site: Path, *, extra: str = "", triton: int = 16, major: int = 10, tokens: int = 128) -> tuple[int, list[Any]]:
    names = [*resolve_engine("vllm==0.32.0").backends, "NO_ATTENTION", *([extra] if extra else [])]
    files = {
        "vllm/v1/attention/backends/registry.py": REGISTRY.format(
            members="; ".join(f"{name} = {index}" for index, name in enumerate(names))
        ),
        "vllm/made_up.py": BACKENDS.format(triton=triton, major=major),
        "vllm/v1/worker/block_table.py": WIDTH.format(tokens=tokens),
        "vllm/platforms/interface.py": "def DeviceCapability(major, minor):\n        return (major, minor)",
        "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
    }
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "blocktable.cli", "backends", "--installed", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(site), "PATH": ""},
    )
    assert not done.stderr
    return done.returncode, json.loads(done.stdout)


def differences(findings: list[Any]) -> dict[str, str]:
    return {finding["subject"]: finding["differs"] for finding in findings if finding["differs"]}


def test_an_engine_as_the_catalogue_has_it_passes(tmp_path: Path) -> None:
    code, findings = ask(tmp_path)
    assert (code, differences(findings)) == (0, {})
    compared = {finding["subject"] for finding in findings if not finding["skipped"]}
    assert compared == {"names of backends", "width of a row", "TRITON_ATTN", "CUTLASS_MLA"}
    skipped = {finding["subject"]: finding["skipped"] for finding in findings}
    assert "rocm" in skipped["ROCM_ATTN"]
    assert "does not import here" in skipped["FLASH_ATTN"]


@pytest.mark.parametrize(
    ("change", "subject", "says"),
    [
        ({"extra": "BRAND_NEW"}, "BRAND_NEW", "the engine has it"),
        ({"triton": 32}, "TRITON_ATTN", "in the catalogue any multiple of 16"),
        ({"major": 9}, "CUTLASS_MLA", "compute capability 9.0: the engine says yes"),
        ({"tokens": 256}, "width of a row", "the engine allocates"),
    ],
)
def test_drift_is_named_and_fails(change: dict[str, Any], subject: str, says: str, tmp_path: Path) -> None:
    code, findings = ask(tmp_path, **change)
    assert code == 1
    assert set(differences(findings)) == {subject}
    assert says in differences(findings)[subject]

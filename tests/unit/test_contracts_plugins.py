"""Contracts that installed packages declare: found by name, loaded late, and harmless when broken."""

import importlib.metadata
import subprocess
import sys
import textwrap

import pytest

from blocktable.contracts import get_contract, list_contracts, plugins


def install(site, name, entry_points, **files):
    """Write a distribution as an installer leaves it: modules, and metadata with entry points."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[blocktable.contracts]\n{lines}")
    for path, text in files.items():
        file = site / path.replace("__", "/", 1)
        file = file.with_suffix(".toml" if "toml" in path else ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


def run(site, script):
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(site), "PATH": ""},
    )
    assert not done.returncode, done.stderr
    return done


@pytest.fixture
def site(tmp_path):
    install(
        tmp_path,
        "acme",
        {"one": "acme_one:CONTRACT", "many": "acme_many:CONTRACTS", "data": "acme_data"},
        acme_one="""
            from blocktable import Contract, TokenMultiple
            CONTRACT = Contract("ACME_ONE", kernel_block_sizes=(64,), width_rule=TokenMultiple(256))
        """,
        acme_many="""
            from blocktable import Contract
            CONTRACTS = [Contract("ACME_A"), Contract("ACME_B", engine="acme")]
        """,
        acme_data__init="",
        acme_data__rules_toml="""
            engine = "acme"
            [[backend]]
            name = "ACME_DATA"
            read = ">=1"
            kernel_block_sizes = [16, "MultipleOf(64)"]
            width_rule = "AtMost"
            error_text = "acme: {width} is more than {max_width}"
            raised = "OverflowError"
        """,
    )
    (tmp_path / "acme_data" / "init.py").rename(tmp_path / "acme_data" / "__init__.py")
    (tmp_path / "acme_data" / "rules_toml.toml").rename(tmp_path / "acme_data" / "rules.toml")
    return tmp_path


def test_a_contract_a_sequence_and_a_package_of_data_are_found_by_name(site):
    out = run(
        site,
        """
        from blocktable import ContractError, get_contract, plan
        print(plan(max_model_len=9416, block_size=64, contracts=["ACME_ONE"]).kernel_width)
        print(get_contract("acme_a").name, get_contract("acme:ACME_B").name)
        try:
            get_contract("ACME_DATA").check_table((1, 9), 64, max_seq_len=512)
        except ContractError as error:
            print(error, error.values["raised"])
        """,
    ).stdout
    assert out.splitlines() == ["148", "ACME_A ACME_B", "acme: 9 is more than 8 OverflowError"]


def test_nothing_is_imported_until_a_name_is_missing_or_a_listing_is_asked_for(site):
    out = run(
        site,
        """
        import sys
        from blocktable import get_contract
        from blocktable.contracts import list_contracts
        get_contract("FLASHINFER_MLA")
        print("acme_one" in sys.modules)
        print([contract.name for contract in list_contracts() if contract.name.startswith("ACME")])
        """,
    ).stdout
    assert out.splitlines() == ["False", "['ACME_ONE', 'ACME_A', 'ACME_B', 'ACME_DATA']"]


@pytest.mark.parametrize(
    ("target", "text", "problem"),
    [
        ("broken", "raise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
        ("broken:NOTHING", "", "AttributeError"),
        ("missing", "", "ModuleNotFoundError"),
        ("broken:THING", "THING = 3", "names int, not a Contract"),
        ("broken:THING", "THING = 'ACME'", "names str, not a Contract"),
        ("broken", "", "AttributeError"),
    ],
)
def test_a_broken_plugin_is_named_and_breaks_nobody_else(site, target, text, problem):
    install(site, "broken", {"wreck": target}, broken=text)
    done = run(
        site,
        """
        from blocktable import UnknownName, get_contract
        from blocktable.contracts import list_contracts
        print(get_contract("ACME_ONE").name, len(list_contracts()) > 10)
        try:
            get_contract("ACME_NONE")
        except UnknownName as error:
            print(error)
        """,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "ACME_ONE True"
    assert "plugin 'wreck'" in lines[1]
    assert "plugin 'wreck'" in done.stderr
    assert problem.split(":")[0] in lines[1] or target == "broken"


def test_wrong_data_in_a_plugin_is_named_by_file_and_line(site):
    (site / "acme_data" / "rules.toml").write_text(
        'engine = "acme"\n[[backend]]\nname = "ACME_DATA"\nmin_width = "2"\n'
    )
    done = run(
        site,
        """
        from blocktable import UnknownName, get_contract
        try:
            get_contract("ACME_DATA")
        except UnknownName as error:
            print(error)
        """,
    )
    assert "acme_data/rules.toml:4: [[backend]] 1: min_width" in done.stdout


def test_plugins_are_read_once_in_a_process(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    plugins.plugin_contracts.cache_clear()
    install(site, "wrecked", {"wreck": "wrecked:THING"}, wrecked="THING = 3")
    try:
        with pytest.warns(RuntimeWarning, match="plugin 'wreck'"):
            assert get_contract("ACME_DATA").kernel_block_sizes[0] == 16
        monkeypatch.setattr(importlib.metadata, "entry_points", None)  # a second reading would fail
        assert get_contract("ACME_ONE").name == "ACME_ONE"
        assert "ACME_A" in [contract.name for contract in list_contracts("vllm")]
        assert plugins.plugin_contracts()[1][0].startswith("plugin 'wreck' (wrecked:THING) failed: ArgumentError")
    finally:
        plugins.plugin_contracts.cache_clear()


def test_a_broken_plugin_breaks_nobody_where_warnings_are_errors(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    plugins.plugin_contracts.cache_clear()
    install(site, "wrecked2", {"wreck": "wrecked2"}, wrecked2="raise OSError")
    try:
        assert get_contract("ACME_ONE").name == "ACME_ONE"  # this suite turns warnings into errors
    finally:
        plugins.plugin_contracts.cache_clear()

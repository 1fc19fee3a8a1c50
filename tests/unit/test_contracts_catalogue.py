"""The shipped data is valid and complete, and wrong data is refused by file, line, entry and field."""

import re
from pathlib import Path

import pytest
from packaging.version import Version

import blocktable.contracts
from blocktable import CatalogueError, TokenMultiple
from blocktable.contracts import known_engines, known_versions, list_contracts, lookup, resolve_engine
from blocktable.contracts.catalogue import read_catalogue

GOOD = """\
engine = "acme"
packages = ["acme-kernels"]

[exists]
OLD = "<2"
SLIDE = ">=1"

[aliases]
SLIDING = "SLIDE"

[[backend]]
name = "SLIDE"
versions = ">=2"
read = ">=2.1"
run = "==3"
kernel_block_sizes = [16, "MultipleOf(64)"]
width_rule = "TokenMultiple(128)"

[[backend]]
name = "OLD"
min_width = 1

[[release]]
version = "3"
width = "gcd-128"
requires = { cogs = "1.0" }

[[release]]
version = "1"
default_block_size = 16

[[release]]
version = "2"
"""


def test_a_file_is_read_with_releases_ascending():
    acme = read_catalogue(GOOD, "acme.toml")
    assert [release.version for release in acme.releases.values()] == ["1", "2", "3"]
    assert [release.newest for release in acme.releases.values()] == [False, False, True]
    assert acme.releases[Version("1")].backends == ("OLD", "SLIDE")
    assert acme.releases[Version("3")].backends == ("SLIDE",)
    assert acme.releases[Version("3")].requires == {"cogs": "1.0"}
    (slide,) = acme.records["SLIDE"]
    assert slide.contract.width_rule == TokenMultiple(128)
    assert [slide.evidence(Version(version)) for version in ("1", "2", "2.1", "3")] == [
        "carried",
        "carried",
        "read",
        "run",
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "entry", "field", "text"),
    [
        ("min_width = 1", 'min_width = "1"', 21, "[[backend]] 2", "min_width", "Expected `int`, got `str`"),
        ("min_width = 1", "min_width = -1", 21, "[[backend]] 2", "min_width", "between 0 and"),
        ("min_width = 1", "min_widht = 1", 21, "[[backend]] 2", "min_widht", "unknown field"),
        ('name = "OLD"\n', "", 19, "[[backend]] 2", "name", "missing required field"),
        (
            'width_rule = "TokenMultiple(128)"',
            'width_rule = "Multiple(128)"',
            17,
            "[[backend]] 1",
            "width_rule",
            "unknown width rule",
        ),
        ('"MultipleOf(64)"', '"x64"', 16, "[[backend]] 1", "kernel_block_sizes", "unknown block size"),
        ("[16,", "[0,", 16, "[[backend]] 1", "kernel_block_sizes", "between 1 and"),
        ("[16,", "[1.5,", 16, "[[backend]] 1", "kernel_block_sizes", "Expected `int | str`"),
        ('versions = ">=2"', 'versions = "2 up"', 13, "[[backend]] 1", "versions", "no version range"),
        ('read = ">=2.1"', 'read = "yes"', 14, "[[backend]] 1", "read", "no version range"),
        ('run = "==3"', 'layout = "round"', 15, "[[backend]] 1", "layout", "Invalid enum value"),
        ('run = "==3"', 'error_text = "got {x}"', 15, "[[backend]] 1", "error_text", "has no value for {x}"),
        ('run = "==3"', 'refusals = { colour = "E: x" }', 15, "[[backend]] 1", "refusals", "must be one of"),
        ('run = "==3"', "calls = { engine = 3 }", 15, "[[backend]] 1", "calls", "Expected `str`"),
        ('width = "gcd-128"', 'width = "wide"', 25, "[[release]] 1", "width", "Invalid enum value"),
        ('version = "2"', 'version = "two"', 33, "[[release]] 3", "version", "is no version"),
        ('version = "2"', 'version = "1.0"', 33, "[[release]] 3", "version", "listed twice"),
        ('SLIDE = ">=1"', 'SLIDE = "1"', 6, "[exists]", "SLIDE", "no version range"),
        ('SLIDING = "SLIDE"', 'SLIDING = "SLID"', 9, "[aliases]", "SLIDING", "is no backend of this file"),
        ('engine = "acme"', "engine = 3", 1, "[engine]", "entry", "Expected `str`"),
        ("[exists]", "[exist]", None, "top level", "exist", "unknown field"),
    ],
)
def test_wrong_data_is_named_by_file_line_entry_and_field(old, new, line, entry, field, text):
    assert GOOD.count(old) == 1 or old in ('name = "OLD"\n', "[16,", "[exists]")
    with pytest.raises(CatalogueError, match=re.escape(text)) as caught:
        read_catalogue(GOOD.replace(old, new, 1), "acme.toml")
    error = caught.value
    place = f"acme.toml:{line}" if line else "acme.toml"
    assert str(error).startswith(f"{place}: {entry}: {field}: ")
    assert error.values["line"] == line


def test_what_is_no_toml_is_named_by_file_and_line():
    with pytest.raises(CatalogueError, match=r"acme.toml: not valid TOML: .*line 2"):
        read_catalogue('engine = "acme"\nnonsense\n', "acme.toml")


def test_a_release_that_no_entry_speaks_for_gets_the_nearest_entry():
    acme = read_catalogue(GOOD, "acme.toml")
    (nearest,) = lookup._nearest(acme, "SLIDE", Version("1"))
    assert nearest.contract.versions == ">=2"
    assert nearest.evidence(Version("1")) == "carried"


def test_the_shipped_data_answers_for_every_backend_of_every_release():
    named = 0
    for engine in known_engines():
        for version in known_versions(engine):
            release = resolve_engine(f"{engine}=={version}")
            contracts = list_contracts(engine, version=version)
            assert {contract.name for contract in contracts} <= set(release.backends)
            assert all(contract.source and contract.date and contract.width_rule for contract in contracts)
            named += len(contracts)
    assert named > 300


def test_every_release_of_vllm_names_the_flashinfer_that_it_pins():
    known = known_versions("flashinfer")
    assert all(resolve_engine(f"vllm=={version}").requires["flashinfer"] in known for version in known_versions("vllm"))


def test_every_kernel_text_of_the_data_can_be_filled_in():
    for engine in known_engines():
        for version in known_versions(engine):
            for contract in list_contracts(engine, version=version):
                for _, text in (*contract.refusals, ("width", contract.error_text)):
                    assert "None" not in text


def test_data_files_lie_beside_the_code():
    folder = Path(blocktable.contracts.__file__).parent
    assert {file.stem for file in folder.glob("*.toml")} == set(known_engines())

"""The names that users import, and what importing them costs."""

import importlib
import json
import pickle
import subprocess
import sys

import pytest

import blocktable
from blocktable import errors


def test_all_dir_and_the_lazy_map_agree():
    assert sorted(blocktable.__all__) == dir(blocktable)
    for name in blocktable.__all__:
        assert getattr(blocktable, name) is not None


def test_a_star_import_brings_every_name():
    names = {}
    exec("from blocktable import *", names)  # noqa: S102 - what a user types
    assert set(blocktable.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'BlockTabels'"):
        blocktable.BlockTabels  # noqa: B018


def loaded_after(code: str) -> set[str]:
    """Return the modules loaded by a fresh interpreter after ``code``."""
    program = f"import sys\n{code}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(json.loads(out.splitlines()[-1]))


HEAVY = {"numpy", "numba", "torch", "rich", "typer", "msgspec", "yaml", "vllm", "sglang", "triton"}


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import blocktable", set()),
        ("import blocktable; blocktable.plan(max_model_len=9416, block_size=32)", set()),
        (
            "import blocktable; blocktable.plan(max_model_len=9416, block_size=32, contracts=['FLASHINFER_MLA'])",
            {"msgspec"},
        ),
        ("import blocktable; blocktable.BlockTables", {"numpy", "numba", "yaml", "msgspec"}),
        ("import blocktable; blocktable.OutOfBlocks", set()),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code, allowed):
    assert loaded_after(code) & HEAVY <= allowed


def test_the_core_names_no_engine_and_no_torch():
    modules = ["tables", "slots", "delta", "replica", "state", "snapshot", "groups", "geometry", "contracts"]
    loaded = loaded_after("\n".join(f"import blocktable.{module}" for module in modules))
    assert not loaded & {"torch", "vllm", "sglang", "triton", "transformers"}


ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_a_blocktable_error_that_keeps_its_fields_across_processes(kind):
    error = kind("seven is too many", law="L2", values={"row": 7}, remedy="use six")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    for one in (error, again):
        assert isinstance(one, blocktable.BlockTableError)
        assert (one.message, one.law, one.values, one.remedy) == ("seven is too many", "L2", {"row": 7}, "use six")
        assert one.row == 7
        assert "seven is too many" in str(one)
        with pytest.raises(AttributeError):
            one.column  # noqa: B018


def test_bad_arguments_are_value_errors_too():
    assert issubclass(errors.ArgumentError, ValueError)
    for kind in (errors.GeometryError, errors.ContractError, errors.UnknownName, errors.NeverFits):
        assert issubclass(kind, errors.ArgumentError)


def test_public_names_have_docstrings():
    for name in blocktable.__all__:
        value = getattr(blocktable, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
    for module in ("contracts", "delta", "errors", "geometry", "groups", "replica", "slots", "tables"):
        assert importlib.import_module(f"blocktable.{module}").__doc__

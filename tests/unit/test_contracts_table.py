"""check_table refuses what the kernel refuses or misreads, in the kernel's words."""

import pickle

import numpy as np
import pytest

from blocktable import (
    AnyWidth,
    ArgumentError,
    AtMost,
    Contract,
    ContractError,
    FloatModulus,
    MultipleOf,
    TokenMultiple,
    get_contract,
)


def refusal(contract, *args, **kwargs):
    with pytest.raises(ContractError) as caught:
        contract.check_table(*args, **kwargs)
    return caught.value


def test_the_text_is_the_kernels_with_its_numbers():
    error = refusal(get_contract("FLASHINFER_MLA"), (8, 295), 32)
    assert str(error) == "Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32"
    assert error.law == "L1"
    assert error.values["raised"] == "ValueError"
    assert (error.values["width"], error.values["multiple"], error.values["contract"]) == (295, 4, "FLASHINFER_MLA")
    assert error.remedy == "allocate 296 columns"
    assert isinstance(error, ValueError)
    get_contract("FLASHINFER_MLA").check_table((8, 296), 32)


def test_an_upper_bound_names_its_range_also_below():
    contract = get_contract("B12X")
    error = refusal(contract, (4, 126), 64, max_seq_len=8000)
    assert str(error) == "decode graph page_table width must fit the prepared capacity: got 126, expected 1..125"
    assert error.remedy == "allocate 125 columns"
    assert str(refusal(contract, (4, 0), 64, max_seq_len=8000)).endswith("got 0, expected 1..125")
    contract.check_table((4, 125), 64, max_seq_len=8000)
    contract.check_table((4, 1), 64, max_seq_len=8000)


def test_a_fact_that_a_rule_needs_is_named_when_missing():
    error = refusal(get_contract("B12X"), (4, 125), 64)
    assert "max_seq_len" in str(error)


def test_flashinfers_validator_passes_a_table_without_columns():
    get_contract("flashinfer:auto@0.7.2").check_table((4, 0), 32)


@pytest.mark.parametrize(
    ("name", "shape", "block", "kwargs", "text", "raised"),
    [
        (
            "flashinfer:trtllm-gen@0.7.2",
            (4, 9),
            16,
            {},
            "trtllm-gen requires block_size in (32, 64), got 16",
            "ValueError",
        ),
        ("flashinfer:trtllm-gen@0.6.6", (4, 9), 16, {}, "Supported block_size are 32 and 64, got 16", "ValueError"),
        (
            "flashinfer:trtllm-gen@0.6.15",
            (4, 9),
            16,
            {},
            "Expected block_num % (128 / block_size) == 0, got block_num=9 and block_size=16",
            "ValueError",
        ),
        (
            "flashinfer:xqa",
            (4, 1),
            256,
            {},
            "Invalid page_size: 256, only 16, 32, 64, 128 are supported",
            "ValueError",
        ),
        (
            "flashinfer:cutlass@0.7.2",
            (4, 3),
            32,
            {},
            "Expected page_table width to align with cutlass page_size, got block_num=3 and page_size=32.",
            "ValueError",
        ),
        (
            "flashinfer:cutlass@0.7.2",
            (4, 3),
            24,
            {},
            "cutlass backend requires integer page_size with 0 < page_size <= 128 and 128 % page_size == 0, got 24.",
            "ValueError",
        ),
        (
            "flashinfer:cutlass@0.6.18",
            (4, 3),
            24,
            {},
            "Expected block_num % (128 / block_size) == 0, got block_num=3 and block_size=24",
            "ValueError",
        ),
        ("CUTLASS_MLA", (4, 0), 128, {}, "block num must be greater than 0, got 0", "AssertionError"),
        (
            "CUTLASS_MLA",
            (4, 2),
            128,
            {"dtype": "int64"},
            "page_table.dtype needs to be int32 but got torch.int64.",
            "AssertionError",
        ),
        (
            "FLASHMLA",
            (4, 9),
            64,
            {"strides": (1, 4)},
            "block_table must have contiguous last dimension",
            "RuntimeError",
        ),
        ("FLASHMLA", (4, 9), 32, {}, "Currently page_block_size must be 64", "RuntimeError"),
        ("CPU_MLA", (4, 9), 16, {"dtype": "int64"}, "expected scalar type Int but found Long", "RuntimeError"),
        ("CPU_ATTN", (4, 9), 16, {}, "No common block size for 16 (CPU_ATTN: [MultipleOf(32)]).", "ValueError"),
        ("FLASH_ATTN", (4, 9), 24, {}, "Paged KV cache block size must be divisible by 16", "RuntimeError"),
        (
            "flashinfer:auto",
            (4, 2, 2, 8),
            32,
            {},
            "block_tables must be 2D for shared paged KV layout, got ndim=4",
            "ValueError",
        ),
    ],
)
def test_texts_of_real_kernels(name, shape, block, kwargs, text, raised):
    error = refusal(get_contract(name), shape, block, **kwargs)
    assert str(error) == text
    assert error.values["raised"] == raised


def test_ids_of_k_and_v_may_be_apart_where_the_layout_is_split():
    split = Contract("SPLIT", layout="split", width_rule=TokenMultiple(128))
    split.check_table((8, 2, 4), 32)
    assert "got 5 columns" in str(refusal(split, (8, 2, 5), 32))
    for shape in ((8, 3, 4), (8,), (), (1, 2, 3, 4)):
        assert refusal(split, shape, 32).values["check"] == "layout"
    assert refusal(Contract("DENSE"), (8, 2, 4), 32).values["check"] == "layout"


def test_strides_that_the_kernel_does_not_honour_are_refused():
    last, compact, free = (Contract("K", strides=demand) for demand in ("last", "compact", "any"))
    view = (8, 1)  # columns 0..3 of a table of 8
    last.check_table((4, 4), 32, strides=view)
    free.check_table((4, 4), 32, strides=(1, 4))
    assert "row stride" in str(refusal(compact, (4, 4), 32, strides=view))
    assert "side by side" in str(refusal(last, (4, 4), 32, strides=(1, 4)))
    compact.check_table((4, 4), 32, strides=(4, 1))
    compact.check_table((1, 4), 32, strides=(8, 1))  # one row: nothing is stepped over
    Contract("K", strides="compact", layout="split").check_table((4, 2, 4), 32, strides=(8, 4, 1))
    with pytest.raises(ArgumentError, match="1 strides for a table of 2 dimensions"):
        last.check_table((4, 4), 32, strides=(1,))
    # A kernel that misreads raises nothing itself, and the error says so.
    assert refusal(compact, (4, 4), 32, strides=view).values["raised"] == ""


def test_dtypes_come_as_names_and_as_numpys():
    contract = Contract("K")
    for dtype in ("int32", np.dtype("int32"), np.int32, "torch.int32"):
        contract.check_table((1, 1), 16, dtype=dtype)
    for dtype in ("int64", np.dtype("int64"), np.int64, "torch.int64", "uint32"):
        assert str(refusal(contract, (1, 1), 16, dtype=dtype)).startswith("K reads an int32 table, got ")


def test_numpy_integers_and_shapes_are_taken():
    table = np.zeros((8, 296), np.int32)
    get_contract("FLASHINFER_MLA").check_table(table.shape, np.int64(32), dtype=table.dtype)
    get_contract("B12X").check_table((np.int32(1), np.int32(125)), 64, max_seq_len=np.int64(8000))


@pytest.mark.parametrize(
    ("shape", "block"),
    [("ab", 32), (7, 32), ((8, 2.0), 32), ((8, True), 32), ((8, -1), 32), ((8, 4), 0), ((8, 4), 32.0), ((8, 4), True)],
)
def test_a_question_that_is_no_table_is_a_wrong_argument(shape, block):
    with pytest.raises(ArgumentError):
        Contract("K").check_table(shape, block)


def test_a_contract_without_a_text_speaks_for_itself():
    contract = Contract("MINE", kernel_block_sizes=[16, 32, MultipleOf(64)], width_rule=AtMost)
    assert str(refusal(contract, (1, 1), 48, max_seq_len=100)) == (
        "MINE takes kernel blocks of 16, 32 or any multiple of 64 tokens, got 48"
    )
    error = refusal(contract, (1, 9), 16, max_seq_len=100)
    assert str(error) == "MINE needs at most 7 (100 tokens / 16), got 9 columns"
    assert error.remedy == "allocate 7 columns"
    assert "another block size" in refusal(Contract("F", width_rule=FloatModulus(128)), (1, 4), 96).remedy


def test_a_contract_is_frozen_hashable_and_travels():
    contract = get_contract("FLASHINFER_MLA")
    assert pickle.loads(pickle.dumps(contract)) == contract  # noqa: S301 - our own bytes
    assert len({contract, get_contract("FLASHINFER_MLA")}) == 1
    with pytest.raises(AttributeError):
        contract.name = "OTHER"
    error = refusal(contract, (8, 295), 32)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


def test_everything_after_the_name_has_a_default():
    contract = Contract("FREE")
    assert contract.kernel_block_sizes == ()
    assert contract.width_rule == AnyWidth()
    for block in (1, 7, 96, 1000):
        contract.check_table((3, 5), block)
    assert Contract("ONE", kernel_block_sizes=64).kernel_block_sizes == (64,)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kernel_block_sizes": [0]}, "kernel_block_sizes"),
        ({"kernel_block_sizes": ["16"]}, "kernel_block_sizes"),
        ({"width_rule": "AnyWidth"}, "width_rule must be a width rule"),
        ({"width_rule": TokenMultiple}, "TokenMultiple needs its number of tokens"),
        ({"layout": "diagonal"}, "layout must be one of dense, split, csr"),
        ({"strides": "none"}, "strides must be one of"),
        ({"tail": "?"}, "tail must be one of"),
        ({"evidence": "hearsay"}, "evidence must be one of run, read, inferred, carried"),
        ({"offset_type": "int16"}, "offset_type must be one of"),
        ({"min_width": -1}, "min_width"),
        ({"error_text": "got {wdith}"}, "has no value for {wdith}"),
        ({"error_text": "got {"}, "unbalanced braces"),
        ({"refusals": {"colour": "ValueError: red"}}, "refusals must be one of"),
        ({"refusals": {"dtype": "red"}}, "written as 'ValueError: text'"),
        ({"pitfalls": [3]}, "pitfalls must be strings"),
    ],
)
def test_a_wrong_field_is_named(fields, text):
    with pytest.raises(ArgumentError, match=text.replace("{", r"\{")):
        Contract("K", **fields)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_contract_has_a_name(name):
    with pytest.raises(ArgumentError, match="name is a non-empty string"):
        Contract(name)


class Multiple:
    """As engines write it: an object with a base."""

    def __init__(self, base):
        self.base = base


class Backend:
    """As engines write it: two methods, called on the class."""

    @staticmethod
    def get_name():
        return "FROM_CLASS"

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [16, Multiple(64)]


def test_an_engines_backend_class_is_read():
    contract = Contract.from_backend(Backend)
    assert (contract.name, contract.kernel_block_sizes) == ("FROM_CLASS", (16, MultipleOf(64)))
    assert contract.width_rule == AnyWidth()
    assert contract.evidence == "run"
    assert contract.source.endswith("Backend")
    assert Contract.from_backend(Backend()).name == "FROM_CLASS"

    class Fails(Backend):
        @staticmethod
        def get_supported_kernel_block_sizes():
            raise RuntimeError("no configuration is set")

    with pytest.raises(ArgumentError, match="raised RuntimeError: no configuration is set"):
        Contract.from_backend(Fails)
    for wrong in (object, 3, None):
        with pytest.raises(ArgumentError, match="no get_name"):
            Contract.from_backend(wrong)

"""testing.check_contract finds the first difference; assert_widths_agree names who disagrees."""

import json
import os
from pathlib import Path

import pytest

from blocktable import ArgumentError, AtMost, Contract, ContractError, FloatModulus, TokenMultiple, get_contract, plan
from blocktable.testing import assert_widths_agree, check_contract


def float_128(shape, block_size):
    if shape[-1] % (128 / block_size) != 0:
        raise ValueError("misaligned")


def test_the_float_rule_agrees_with_the_float_expression_over_a_sweep():
    check_contract(
        Contract("F", width_rule=FloatModulus(128)), float_128, block_sizes=range(1, 1025, 5), widths=range(1, 33)
    )


def test_the_first_difference_is_named():
    with pytest.raises(
        AssertionError, match=r"I, block size 3, width 128: the contract accepts .* \(ValueError: misal"
    ):
        check_contract(Contract("I", width_rule=TokenMultiple(128)), float_128)
    with pytest.raises(AssertionError, match=r"F, block size 1, width 1: the contract refuses .* the kernel accepts"):
        check_contract(Contract("F", width_rule=FloatModulus(128)), lambda _shape, _block: None)


def test_a_bound_is_compared_at_a_given_longest_sequence():
    def validator(shape, block_size):
        assert shape[1] <= -(-1000 // block_size), "too wide"

    check_contract(Contract("B", width_rule=AtMost()), validator, range(1, 65), range(1, 40), max_seq_len=1000)
    with pytest.raises(ContractError, match="max_seq_len was not given"):
        check_contract(Contract("B", width_rule=AtMost()), validator)


def test_widths_agree_in_one_unit():
    geometry = plan(max_model_len=9416, block_size=544, contracts=["FLASHINFER_MLA"])
    assert_widths_agree({"spec": 18, "runner": 18}, geometry)
    assert_widths_agree({"builder": 308, "indexer": 308}, geometry)
    with pytest.raises(AssertionError, match=r"spec 18, builder 308; the geometry has 18 manager blocks, 308 kernel"):
        assert_widths_agree({"spec": 18, "builder": 308}, geometry)
    with pytest.raises(AssertionError, match="indexer 306"):
        assert_widths_agree({"builder": 308, "indexer": 306}, geometry)
    with pytest.raises(ArgumentError, match="no widths"):
        assert_widths_agree({}, geometry)


SWEEP = Path(os.environ.get("BLOCKTABLE_DATA") or ".") / "flashinfer-width-sweep.json"
RECORDED = {  # contract, by the validator whose answers were recorded
    "_check_trtllm_gen_mla_shape(require_aligned_block_table=True)": ("auto", "cute-dsl", "xqa"),
    "_check_trtllm_gen_mla_shape(require_aligned_block_table=False)": ("trtllm-gen",),
    "_check_cutlass_shape": ("cutlass",),
    "trtllm_batch_decode_with_kv_cache_mla backend=auto fixed-Q SM100": ("auto",),
    "trtllm_batch_decode_with_kv_cache_mla backend=trtllm-gen fixed-Q SM100": ("trtllm-gen",),
    "trtllm_batch_decode_with_kv_cache_mla backend=xqa fixed-Q SM120": ("xqa",),
}
ENTRY = (
    "trtllm_batch_decode"  # an entry point tests the page size as well; the shared validator leaves it to its callers
)


@pytest.mark.skipif(not SWEEP.is_file(), reason="BLOCKTABLE_DATA has no flashinfer-width-sweep.json")
@pytest.mark.parametrize("validator", RECORDED)
def test_recorded_answers_of_the_real_validators(validator):
    records = [one for one in json.loads(SWEEP.read_text()) if one["validator"] == validator]
    assert records
    for record in records:
        block, accepted = record["block_size"], set(record["passing_widths"])
        for name in RECORDED[validator]:
            contract = get_contract(name, engine="flashinfer", version="0.7.2.post1")
            if contract.accepts_block(block):
                refused = refusals(contract, block)
                assert accepted == set(range(1, 65)) - set(refused)
                if record.get("first_error"):
                    assert refused[min(refused)] == record["first_error"]
            elif validator.startswith(ENTRY) and name != "xqa":
                # xqa: Python lets 8, 256 and 512 through, and the kernel's compilation refuses them.
                assert not accepted


def refusals(contract, block):
    """The widths from 1 to 64 that a contract refuses, each with its text."""
    texts = {}
    for width in range(1, 65):
        try:
            contract.check_table((1, width), block)
        except ContractError as error:
            texts[width] = str(error)
    return texts

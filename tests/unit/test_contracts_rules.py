"""Width rules give exactly the widths that their literal expressions accept."""

import pytest

from blocktable import (
    AnyWidth,
    ArgumentError,
    AtLeast,
    AtMost,
    ContractError,
    Exactly,
    FloatModulus,
    MultipleOf,
    TokenMultiple,
)
from blocktable.contracts.rules import Widths, parse_rule, parse_size


def test_float_modulus_is_the_float_expression_for_every_block_size():
    for tokens in (1, 64, 100, 128, 4096):
        for block in range(1, 1025):
            widths = FloatModulus(tokens).widths(block)
            for width in (*range(257), 1000, 65536, 2**31 - 1):
                assert (width in widths) == (width % (tokens / block) == 0.0), (tokens, block, width)


@pytest.mark.parametrize("block", [24, 40, 48, 80, 96, 112, 144, 192, 384, 640, 768, 1280])
def test_a_page_that_is_no_power_of_two_meets_the_float_modulus_at_no_int32_width(block):
    assert FloatModulus(128).widths(block).multiple > 2**31
    assert not any(width % (128 / block) == 0.0 for width in range(1, 5000))


def test_float_modulus_at_pages_past_the_tile_accepts_every_width():
    assert [FloatModulus(128).widths(block).multiple for block in (1, 64, 128, 256, 512, 4096)] == [128, 2, 1, 1, 1, 1]


def test_token_multiple_is_the_integer_expression_for_every_block_size():
    for block in range(1, 1025):
        widths = TokenMultiple(128).widths(block)
        assert all((width in widths) == (width * block % 128 == 0) for width in range(300))


@pytest.mark.parametrize(
    ("rule", "accepts"),
    [
        (AtMost(), lambda width, needed: width <= needed),
        (AtLeast(), lambda width, needed: width >= needed),
        (Exactly(), lambda width, needed: width == needed),
    ],
)
def test_bounds_compare_with_the_blocks_of_the_longest_sequence(rule, accepts):
    for length in (1, 63, 64, 65, 8000, 9416):
        for block in (1, 16, 64, 100):
            needed = -(-length // block)
            for width in range(max(0, needed - 3), needed + 4):
                assert (width in rule.widths(block, length)) == accepts(width, needed)


@pytest.mark.parametrize("rule", [AtMost(), AtLeast(), Exactly()])
def test_a_bound_without_the_longest_sequence_says_which_fact_is_missing(rule):
    with pytest.raises(ContractError, match="max_seq_len was not given") as caught:
        rule.widths(64)
    assert caught.value.values["missing"] == "max_seq_len"
    assert "max_seq_len" in caught.value.remedy


def test_any_width_accepts_none_at_all():
    assert AnyWidth().widths(16) == Widths(1, 0, None)
    assert 0 in AnyWidth().widths(16)
    assert "3" not in AnyWidth().widths(16)


def test_what_a_rule_says_names_the_numbers():
    assert TokenMultiple(128).describe(32) == "a multiple of 4 (128 tokens / 32)"
    assert FloatModulus(128).describe(64) == "a multiple of 2 (128 tokens / 64)"
    assert "no width meets" in FloatModulus(128).describe(96)
    assert AtMost().describe(64, 8000) == "at most 125 (8000 tokens / 64)"
    assert AtLeast().describe(64, 8000) == "at least 125 (8000 tokens / 64)"
    assert Exactly().describe(64, 8000) == "exactly 125 (8000 tokens / 64)"
    assert AnyWidth().describe(64) == "any width"


def test_data_files_write_rules_and_sizes_with_the_same_words():
    assert parse_rule("FloatModulus(128)") == FloatModulus(128)
    assert parse_rule("Exactly") == Exactly()
    assert parse_size("MultipleOf(16)") == MultipleOf(16)
    for text in ("TokenMultiple", "AtMost(3)", "Sometimes", "", "TokenMultiple(x)", "TokenMultiple(-1)"):
        with pytest.raises(ArgumentError, match="unknown width rule"):
            parse_rule(text)
    with pytest.raises(ArgumentError, match="unknown block size"):
        parse_size("16n")


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "16", None, 2**63])
def test_counts_of_tokens_are_positive_integers(wrong):
    for make in (MultipleOf, TokenMultiple, FloatModulus, parse_size):
        with pytest.raises(ArgumentError):
            make(wrong)

"""plan's right values, its refusals with their ways out, and what a Geometry checks."""

import dataclasses
import pickle

import numpy as np
import pytest

from blocktable import (
    ArgumentError,
    AtLeast,
    AtMost,
    Contract,
    ContractError,
    Exactly,
    FloatModulus,
    Geometry,
    GeometryError,
    MultipleOf,
    TokenMultiple,
    UnknownName,
    plan,
)
from blocktable.contracts import resolve_engine
from blocktable.geometry import MAX_COLUMNS, ways_out

ALIGNED = Contract("ALIGNED", width_rule=TokenMultiple(128))
MLA = ["FLASHINFER_MLA"]


def shape(geometry):
    return (
        geometry.kernel_block_size,
        geometry.min_blocks,
        geometry.width,
        geometry.kernel_width,
        geometry.padding,
    )


@pytest.mark.parametrize(
    ("limit", "native", "padded"), [(9416, 295, 296), (1025, 33, 36), (1024, 32, 32), (202752, 6336, 6336)]
)
def test_a_width_is_native_or_rounded_to_whole_tiles(limit, native, padded):
    assert plan(max_model_len=limit, block_size=32).kernel_width == native
    assert plan(max_model_len=limit, block_size=32, contracts=[ALIGNED]).kernel_width == padded


@pytest.mark.parametrize(
    ("limit", "block", "contracts", "expected"),
    [
        (9416, 544, MLA, (32, 18, 18, 308, 2)),
        (9416, 32, MLA, (32, 295, 296, 296, 1)),
        (9416, 48, [ALIGNED], (48, 197, 200, 200, 3)),
        (9416, 64, MLA, (64, 148, 148, 148, 0)),
        (9416, 128, MLA, (64, 74, 74, 148, 0)),
        (202752, 64, [], (64, 3168, 3168, 3168, 0)),
        (157696, 64, [], (64, 2464, 2464, 2464, 0)),
        (262144, 640, [Contract("K", kernel_block_sizes=(128,))], (128, 410, 410, 2050, 0)),
        (62, 16, [], (16, 4, 4, 4, 0)),
        (80000, 128, [], (128, 625, 625, 625, 0)),
    ],
)
def test_right_values(limit, block, contracts, expected):
    assert shape(plan(max_model_len=limit, block_size=block, contracts=contracts)) == expected


@pytest.mark.parametrize(
    ("manager", "sizes", "kernel"),
    [
        (256, [(16, 32)], 32),
        (4192, [(16, 32, 64)], 32),
        (2112, [(16, 32, 64)], 64),
        (672, [(16, 32, 64), (MultipleOf(16),)], 32),
        (672, [(MultipleOf(16),)], 672),
        (96, [(1, MultipleOf(16))], 96),
        (24, [(1, MultipleOf(16))], 1),
        (48, [(), (16,)], 16),
    ],
)
def test_the_kernel_block_is_the_largest_accepted_divisor(manager, sizes, kernel):
    contracts = [Contract(f"K{index}", kernel_block_sizes=one) for index, one in enumerate(sizes)]
    assert plan(max_model_len=1000, block_size=manager, contracts=contracts).kernel_block_size == kernel


def test_no_common_kernel_block_names_both_sets():
    with pytest.raises(GeometryError, match=r"no kernel block divides 16 and suits K \(64\)") as caught:
        plan(max_model_len=1000, block_size=16, contracts=[Contract("K", kernel_block_sizes=(64,))])
    assert caught.value.law == "L1"
    assert caught.value.values["accepted"] == {"K": (64,)}
    assert {"block_size": 64} in caught.value.values["ways_out"]


def test_the_engines_width_is_returned_unjudged_and_check_judges_it():
    engine = plan(max_model_len=9416, block_size=544, contracts=MLA, engine="vllm==0.32.0")
    assert shape(engine) == (32, 18, 20, 340, 34)
    engine.check((8, 340))
    older = plan(max_model_len=9416, block_size=32, contracts=MLA, engine="vllm==0.19.1")
    assert older.kernel_width == 295
    with pytest.raises(ContractError, match="got block_num=295 and block_size=32"):
        older.check((8, older.kernel_width))
    split = plan(max_model_len=9416, block_size=96, contracts=MLA, engine=resolve_engine("vllm==0.23.0"))
    assert (split.kernel_block_size, split.kernel_width) == (32, 297)
    native = plan(max_model_len=9416, block_size=32, contracts=["trtllm-gen"], engine="flashinfer==0.7.2")
    native.check((1, native.kernel_width))
    checked = plan(max_model_len=9416, block_size=32, contracts=["trtllm-gen"], engine="flashinfer==0.6.15")
    with pytest.raises(ContractError):
        checked.check((1, checked.kernel_width))


def test_the_engine_does_not_widen_for_lookahead_and_an_upper_bound_knows():
    drafts = plan(max_model_len=8000, block_size=64, contracts=["B12X"], engine="vllm==0.32.0", lookahead=8)
    assert (drafts.kernel_width, drafts.lookahead) == (126, 0)
    with pytest.raises(ContractError, match=r"got 126, expected 1\.\.125"):
        drafts.check((1, 126))
    own = plan(max_model_len=8000, block_size=64, contracts=["B12X"], lookahead=8)
    assert (own.kernel_width, own.max_seq_len) == (126, 8008)
    own.check((1, 126))


def test_names_are_looked_up_in_the_engines_release():
    geometry = plan(max_model_len=9416, block_size=32, contracts=["TREE_ATTN"], engine="vllm==0.19.1")
    assert geometry.contracts[0].name == "TREE_ATTN"
    with pytest.raises(UnknownName):
        plan(max_model_len=9416, block_size=32, contracts=["TREE_ATTN"], engine="vllm==0.32.0")
    other = plan(max_model_len=9416, block_size=32, contracts=["flashinfer:auto"], engine="vllm==0.32.0")
    assert other.contracts[0].engine == "flashinfer"
    with pytest.raises(UnknownName, match="older than the data"):
        plan(max_model_len=9416, block_size=32, engine="vllm==0.1")


def test_ranks_divide_before_rounding():
    for ranks, native, padded in ((1, 295, 296), (2, 148, 148), (4, 74, 76), (8, 37, 40)):
        assert plan(max_model_len=9416, block_size=32, cp_size=ranks).kernel_width == native
        geometry = plan(max_model_len=9416, block_size=32, cp_size=ranks, contracts=MLA, cp_interleave=16)
        assert (geometry.kernel_width, geometry.max_seq_len) == (padded, -(-9416 // ranks))


def test_lookahead_and_extra_blocks_widen():
    assert plan(max_model_len=48 + 10, lookahead=3, block_size=16).min_blocks == 4
    assert plan(max_model_len=4096, block_size=512, extra_blocks=3).width == 11
    assert plan(max_model_len=4096, block_size=512).width == 8


def test_multiples_that_share_no_factor_meet_at_their_common_one():
    three, two = Contract("THREE", width_rule=TokenMultiple(48)), Contract("TWO", width_rule=TokenMultiple(32))
    assert plan(max_model_len=9416, block_size=16, contracts=[three, two]).kernel_width == 594
    # An engine that rounds to 8 blocks, a kernel that asks for multiples of 6: whole multiples of 24 suit both.
    refused = plan(
        max_model_len=9416,
        block_size=16,
        contracts=[Contract("SIX", width_rule=TokenMultiple(96))],
        engine="vllm==0.32.0",
    )
    assert refused.kernel_width == 592
    assert ways_out(refused)[:3] == [{"max_model_len": 9216}, {"max_model_len": 9473}, {"max_model_len": 9600}]


def test_reasons_say_which_contract_decided_what():
    block, width = plan(max_model_len=9416, block_size=544, contracts=[*MLA, "vllm:TRITON_MLA"]).reasons
    assert block == "kernel block 32: the largest that divides 544 and suits FLASHINFER_MLA (32 or 64)"
    assert width == "308 columns in place of 306: FLASHINFER_MLA needs a multiple of 4 (128 tokens / 32)"
    whole, native = plan(max_model_len=9416, block_size=16).reasons
    assert "whole" in whole
    assert "no padding" in native
    assert (
        "vllm 0.32.0 allocates 20 blocks" in plan(max_model_len=9416, block_size=544, engine="vllm==0.32.0").reasons[1]
    )


def test_a_geometry_is_frozen_and_travels():
    geometry = plan(max_model_len=9416, block_size=544, contracts=MLA, engine="vllm==0.32.0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.width = 3
    assert pickle.loads(pickle.dumps(geometry)) == geometry  # noqa: S301 - our own bytes
    assert isinstance(geometry, Geometry)
    assert len({geometry, plan(max_model_len=9416, block_size=544, contracts=MLA, engine=geometry.engine)}) == 1


CONFLICTS = {
    "128-token multiples against an upper bound": ([ALIGNED, Contract("BOUND", width_rule=AtMost())], 32),
    "128-token multiples against an exact width": ([ALIGNED, Contract("EXACT", width_rule=Exactly())], 32),
    "a float modulus that no width meets": ([Contract("FLOAT", width_rule=FloatModulus(128))], 96),
    "a split block against an exact width": ([Contract("E", width_rule=Exactly(), kernel_block_sizes=(32,))], 544),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_contracts_that_cannot_be_met_name_rule_values_and_ways_out(case):
    contracts, block = CONFLICTS[case]
    with pytest.raises(GeometryError, match="no width of ") as caught:
        plan(max_model_len=9416, block_size=block, contracts=contracts)
    error = caught.value
    assert error.law == "L1"
    assert all(contract.name in error.message for contract in contracts)
    assert error.values["ways_out"]
    assert error.remedy.startswith("ways out: ")
    for way in error.values["ways_out"]:
        plan(**{"max_model_len": 9416, "block_size": block, "contracts": contracts} | way)


def test_the_ways_out_of_a_conflict_are_the_nearest_lengths_block_sizes_and_contracts():
    contracts = [ALIGNED, Contract("BOUND", width_rule=AtMost())]
    with pytest.raises(GeometryError) as caught:
        plan(max_model_len=9416, block_size=32, contracts=contracts)
    ways = caught.value.values["ways_out"]
    assert ways[:3] == [{"max_model_len": 9344}, {"max_model_len": 9441}, {"max_model_len": 9472}]
    assert {"block_size": 64} in ways
    assert {"contracts": (contracts[1],)} in ways
    assert "max_model_len 9344, or 9441 to 9472" in caught.value.remedy
    assert "without ALIGNED" in caught.value.remedy


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_model_len": 0},
        {"max_model_len": -9416},
        {"max_model_len": 10**12},
        {"max_model_len": 10**30},
        {"max_model_len": True},
        {"max_model_len": 9416.0},
        {"max_model_len": "9416"},
        {"max_model_len": None},
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": "16"},
        {"block_size": np.float64(16)},
        {"block_size": 2**62},
        {"lookahead": -1},
        {"lookahead": 10**12},
        {"extra_blocks": -1},
        {"extra_blocks": 10**12},
        {"extra_blocks": 1.5},
        {"cp_size": 0},
        {"cp_size": False},
        {"cp_interleave": 0},
        {"cp_interleave": 3},
        {"cp_interleave": 64},
        {"max_model_len": 0, "block_size": 48, "lookahead": -1},
        {"max_model_len": -1, "block_size": 0, "cp_size": 0, "cp_interleave": 0, "extra_blocks": -1},
        {"contracts": "FLASHINFER_MLA"},
        {"contracts": ALIGNED},
        {"contracts": 3},
        {"engine": "vllm==0.32.0", "extra_blocks": 2},
        {"engine": "vllm==0.32.0", "block_size": 48},
        {"contracts": ["CPU_MLA"]},
        {"contracts": ["B12X"], "block_size": 256},
    ],
)
def test_every_refusal_names_ways_out_that_are_accepted(wrong):
    request = {"max_model_len": 9416, "block_size": 32, "contracts": MLA} | wrong
    with pytest.raises(GeometryError) as caught:
        plan(**request)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.remedy
    assert error.values["ways_out"]
    for way in error.values["ways_out"]:
        assert all(name in error.remedy for name in way if name != "contracts")
        plan(**request | way)


def test_a_lone_string_is_an_error_that_says_how_to_write_it():
    with pytest.raises(GeometryError, match=r"write contracts=\['FLASHINFER_MLA'\]"):
        plan(max_model_len=9416, block_size=32, contracts="FLASHINFER_MLA")


def test_numpy_integers_are_taken_and_do_not_overflow():
    geometry = plan(max_model_len=np.int32(2**31 - 1), block_size=np.int8(64), cp_size=np.uint8(1), contracts=[ALIGNED])
    assert type(geometry.kernel_width) is int
    assert geometry.kernel_width == 2**25
    with pytest.raises(GeometryError) as caught:
        plan(max_model_len=np.int32(9416), block_size=np.int16(48), contracts=MLA)
    assert {"block_size": 64} in caught.value.values["ways_out"]


def test_the_widest_row_that_is_planned():
    assert plan(max_model_len=MAX_COLUMNS, block_size=1).width == MAX_COLUMNS
    with pytest.raises(GeometryError) as caught:
        plan(max_model_len=MAX_COLUMNS + 1, block_size=1)
    assert caught.value.values["ways_out"] == [{"max_model_len": MAX_COLUMNS}]


def test_check_refuses_a_row_too_narrow_for_the_limit():
    geometry = plan(max_model_len=9416, block_size=32, contracts=MLA)
    geometry.check((0, 296))
    geometry.check((8, 300))  # wider than planned, and accepted
    with pytest.raises(GeometryError, match="292 columns of 32 tokens are too few for a row: 295 are needed") as caught:
        geometry.check((8, 292))
    for way in caught.value.values["ways_out"]:
        geometry.check(**way)
    with pytest.raises(ContractError, match="got block_num=291"):
        geometry.check((8, 291))
    bare = plan(max_model_len=9416, block_size=32)
    bare.check(np.zeros((2, 295), np.int32).shape, dtype=np.int32)
    for wrong in ((295,), (2, 2, 295)):
        with pytest.raises(ContractError, match=r"takes a table \[B, W\]"):
            bare.check(wrong)
    with pytest.raises(ContractError, match="int64"):
        bare.check((2, 295), dtype="int64")
    with pytest.raises(ContractError, match="row stride"):
        geometry.check((2, 296), strides=(512, 1))


def test_check_takes_ids_of_k_and_v_apart_where_the_contract_does():
    geometry = plan(max_model_len=9416, block_size=32, contracts=["flashinfer:auto"])
    geometry.check((8, 2, 296))
    with pytest.raises(ContractError):
        geometry.check((8, 2, 295))


def test_bounds_are_judged_at_the_longest_row_of_a_rank():
    bound, least = Contract("B", width_rule=AtMost()), Contract("L", width_rule=AtLeast())
    geometry = plan(max_model_len=9416, block_size=32, cp_size=2, contracts=[bound, least])
    assert geometry.kernel_width == 148
    geometry.check((1, 148))
    for width in (147, 149):
        with pytest.raises(ContractError):
            geometry.check((1, width))


@pytest.mark.parametrize("contracts", [(), ["B12X"]])
def test_a_pool_must_fit_the_offset_type(contracts):
    geometry = plan(max_model_len=9416, block_size=64, contracts=contracts)
    geometry.check_pool(7767, 276480)
    with pytest.raises(GeometryError, match="reach offset 2147696640, past int32") as caught:
        geometry.check_pool(7768, 276480)
    assert caught.value.law == "L12"
    for way in caught.value.values["ways_out"]:
        geometry.check_pool(**{"num_blocks": 7768, "block_stride": 276480} | way)


def test_declared_64_bit_offsets_reach_further_and_ids_still_fit_32():
    wide = plan(
        max_model_len=9416, block_size=64, contracts=[Contract("W", offset_type="int64", kernel_block_sizes=(16,))]
    )
    wide.check_pool(7768, 276480)
    wide.check_pool(2**29, 2**31)
    with pytest.raises(GeometryError, match="need ids past int32") as caught:
        wide.check_pool(2**29 + 1, 1)
    assert caught.value.values["ways_out"] == [{"num_blocks": 2**29}]
    mixed = plan(max_model_len=9416, block_size=64, contracts=[*wide.contracts, Contract("N")])
    with pytest.raises(GeometryError, match="past int32 of N"):
        mixed.check_pool(7768, 276480)
    with pytest.raises(GeometryError) as caught:
        mixed.check_pool(1, 2**40)
    for way in caught.value.values["ways_out"]:
        mixed.check_pool(**{"num_blocks": 1, "block_stride": 2**40} | way)
    with pytest.raises(GeometryError, match="use num_blocks 1"):
        wide.check_pool(0, 5)


def test_kernel_ids_expand_in_order():
    five = plan(max_model_len=9416, block_size=640, contracts=[Contract("K", kernel_block_sizes=(128,))])
    ids = five.kernel_ids([2, 0, 3])
    assert ids.dtype == np.int32
    assert ids.tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 15, 16, 17, 18, 19]
    two = plan(max_model_len=9416, block_size=128, contracts=["vllm:FLASHMLA"])
    assert two.kernel_ids([4, 9], num_tokens=160).tolist() == [8, 9, 18]
    assert two.kernel_ids([4, 9], num_tokens=0).tolist() == []
    assert two.kernel_ids([4, 9], num_tokens=256).tolist() == [8, 9, 18, 19]
    assert two.kernel_ids([]).tolist() == []
    assert two.kernel_ids(np.array([2**30 - 1], np.int64)).tolist() == [2**31 - 2, 2**31 - 1]
    one = plan(max_model_len=9416, block_size=32)
    assert one.kernel_ids((7, 2**31 - 1)).tolist() == [7, 2**31 - 1]


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        ([4, 9], 257),
        ([4], -1),
        ([4], 1.0),
        ([2**30], None),
        ([-1], None),
        ([[4, 9]], None),
        ([1.5], None),
        ([True], None),
    ],
)
def test_kernel_ids_refuses_what_would_not_be_an_id(ids, tokens):
    geometry = plan(max_model_len=9416, block_size=128, contracts=["vllm:FLASHMLA"])
    with pytest.raises(ArgumentError):
        geometry.kernel_ids(ids, tokens)


def test_ways_out_of_an_engines_own_width_are_judged():
    refused = plan(max_model_len=9416, block_size=32, contracts=MLA, engine="vllm==0.19.1")
    ways = ways_out(refused)
    assert ways[:3] == [{"max_model_len": 9344}, {"max_model_len": 9441}, {"max_model_len": 9472}]
    bound = plan(max_model_len=8000, block_size=64, contracts=["B12X"], engine="vllm==0.32.0")
    assert {"max_model_len": 7936} in ways_out(bound)
    assert {"block_size": 128} in ways_out(bound)
    split = plan(max_model_len=9416, block_size=96, contracts=MLA, engine="vllm==0.23.0")
    for geometry in (refused, bound, split):
        for way in ways_out(geometry):
            names = ("max_model_len", "block_size", "contracts", "engine", "cp_size")
            mended = plan(**{name: getattr(geometry, name) for name in names} | way)
            mended.check((1, mended.kernel_width))
            if "max_model_len" in way:  # the nearest: one token more below, or less above, is refused again
                step = 1 if way["max_model_len"] < geometry.max_model_len else -1
                if way == ways_out(geometry)[2]:
                    step = 1
                worse = plan(
                    **{name: getattr(geometry, name) for name in names} | {"max_model_len": way["max_model_len"] + step}
                )
                with pytest.raises(ContractError):
                    worse.check((1, worse.kernel_width))

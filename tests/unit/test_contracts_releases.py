"""What each release allocates, against the expression in that release's own source."""

from math import ceil, gcd

import pytest

from blocktable import ArgumentError
from blocktable.contracts import known_versions, resolve_engine


def native(tokens, block, ranks):
    return ceil(tokens / (block * ranks))


def floor_128(tokens, block, ranks):  # 0.21.0: cdiv(n, 128 // bs) * (128 // bs) if bs <= 128 else n
    blocks = native(tokens, block, ranks)
    return ceil(blocks / (128 // block)) * (128 // block) if block <= 128 else blocks


def gcd_128(tokens, block, ranks):  # 0.27.0: a multiple of 128 // gcd(128, block_size)
    step = 128 // gcd(128, block)
    return ceil(native(tokens, block, ranks) / step) * step


def policy(version):
    parts = tuple(int(part) for part in version.split("."))
    return native if parts <= (0, 20, 2) else floor_128 if parts <= (0, 26, 0) else gcd_128


@pytest.mark.parametrize("version", known_versions("vllm"))
def test_widths_are_those_of_the_releases_own_expression(version):
    release = resolve_engine(f"vllm=={version}")
    expected = policy(version)
    for block in (1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 192, 256, 544, 640, 1056):
        for tokens in (1, 127, 1024, 1025, 9416, 131072, 202752):
            for ranks in (1, 2, 8):
                width = release.width(max_model_len=tokens, block_size=block, cp_size=ranks)
                assert width == expected(tokens, block, ranks), (block, tokens, ranks)


@pytest.mark.parametrize(
    ("block", "raw", "floor", "common"),
    [
        (24, 393, 395, 400),
        (32, 295, 296, 296),
        (40, 236, 237, 240),
        (48, 197, 198, 200),
        (64, 148, 148, 148),
        (80, 118, 118, 120),
        (96, 99, 99, 100),
        (112, 85, 85, 88),
        (144, 66, 66, 72),
        (192, 50, 50, 50),
        (640, 15, 15, 15),
    ],
)
def test_measured_widths_at_9416(block, raw, floor, common):
    widths = [
        resolve_engine(f"vllm=={version}").width(max_model_len=9416, block_size=block)
        for version in ("0.20.2", "0.21.0", "0.32.0")
    ]
    assert widths == [raw, floor, common]


FAILING_SHARES = {  # manager block, kernel block: percent of lengths 1..20000 that FlashInfer's check refuses
    (32, 32): (75.0, 0, 0),
    (64, 64): (50.1, 0, 0),
    (96, 32): (75, 75, 0),
    (128, 64): (0, 0, 0),
    (160, 32): (75.2, 75.2, 0),
    (192, 64): (50.1, 50.1, 0),
    (320, 64): (50.4, 50.4, 0),
    (544, 32): (75.5, 75.5, 0),
    (640, 64): (0, 0, 0),
    (1056, 32): (78.9, 78.9, 0),
}


@pytest.mark.parametrize(("blocks", "shares"), FAILING_SHARES.items())
def test_the_recorded_shares_of_failing_lengths_are_reproduced_to_the_digit(blocks, shares):
    manager, kernel = blocks
    for version, share in zip(("0.20.2", "0.26.0", "0.32.0"), shares, strict=True):
        release = resolve_engine(f"vllm=={version}")
        refused = sum(
            release.width(max_model_len=tokens, block_size=manager) * (manager // kernel) % (128 / kernel) != 0
            for tokens in range(1, 20001)
        )
        assert round(refused / 200, 1) == share


def test_lookahead_widens_state_groups_alone():
    release = resolve_engine("vllm==0.32.0")
    for kind in ("full", "window", "chunked"):
        assert release.width(max_model_len=9416, block_size=32, lookahead=3, kind=kind) == 296
    assert release.width(max_model_len=4096, block_size=512, lookahead=3, kind="state") == 11
    assert release.width(max_model_len=4096, block_size=512, kind="state") == 8
    assert release.width(max_model_len=9416, block_size=32, lookahead=3, kind="state") == 298
    assert release.width(max_model_len=9416, block_size=32, kind="ring") == 1
    assert resolve_engine("vllm==0.26.0").width(max_model_len=9416, block_size=32, lookahead=3, kind="state") == 300


def test_a_kernel_package_allocates_nothing_of_its_own():
    assert resolve_engine("flashinfer==0.7.2").width(max_model_len=9416, block_size=32) == 295


def test_ranks_of_the_prefill_divide_up_to_0_25_1():
    divides = [version for version in known_versions("vllm") if resolve_engine(f"vllm=={version}").prefill_ranks_divide]
    assert divides[-1] == "0.25.1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_model_len": 0},
        {"block_size": -16},
        {"cp_size": 0},
        {"kind": "ful"},
        {"lookahead": -1},
        {"block_size": 16.0},
    ],
)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ArgumentError):
        resolve_engine("vllm").width(**{"max_model_len": 9416, "block_size": 16, "kind": "state"} | wrong)

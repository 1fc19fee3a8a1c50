"""plan against a search that knows only the literal rule expressions: nothing smaller is accepted, and nothing is missed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable import (
    AnyWidth,
    AtLeast,
    AtMost,
    Contract,
    ContractError,
    Exactly,
    FloatModulus,
    GeometryError,
    MultipleOf,
    TokenMultiple,
    plan,
)
from blocktable.contracts import known_engines, known_versions, list_contracts

CATALOGUE = sorted(
    {
        contract
        for engine in known_engines()
        for version in (
            known_versions(engine)[0],
            known_versions(engine)[-1],
            known_versions(engine)[len(known_versions(engine)) // 2],
        )
        for hardware in ("10.0", "12.0")
        for contract in list_contracts(engine, version=version, hardware=hardware if engine == "flashinfer" else None)
        if contract.engine
    },
    key=repr,
)
RULES = [
    AnyWidth(),
    AtMost(),
    AtLeast(),
    Exactly(),
    *(rule(n) for rule in (TokenMultiple, FloatModulus) for n in (64, 96, 128, 256)),
]
SEARCH = 1300  # columns past the fewest: no pair of these rules meets later than that, if at all


def literally(contract, width, block, longest):
    """The rule as the kernel writes it."""
    if width < contract.min_width:
        return False
    rule = contract.width_rule
    blocks = -(-longest // block)
    if isinstance(rule, TokenMultiple):
        return width * block % rule.tokens == 0
    if isinstance(rule, FloatModulus):
        return width % (rule.tokens / block) == 0.0
    if isinstance(rule, AtMost):
        return width <= blocks
    if isinstance(rule, AtLeast):
        return width >= blocks
    return width == blocks if isinstance(rule, Exactly) else True


def takes(sizes, size):
    return not sizes or any(size % one.base == 0 if isinstance(one, MultipleOf) else size == one for one in sizes)


def search(limit, block, contracts, ranks, ahead=0, extra=0, reach=SEARCH):
    """Return (kernel block, width), or None: every divisor from the largest, then every width from the fewest columns."""
    if not all(takes(contract.manager_block_sizes, block) for contract in contracts):
        return None
    for kernel in range(block, 0, -1):
        if block % kernel == 0 and all(takes(contract.kernel_block_sizes, kernel) for contract in contracts):
            break
    else:
        return None
    fewest = (-(-(limit + ahead) // (block * ranks)) + extra) * (block // kernel)
    longest = -(-(limit + ahead) // ranks)
    for width in range(fewest, fewest + reach):
        if all(literally(contract, width, kernel, longest) for contract in contracts):
            return kernel, width
    return None


synthetic = st.builds(
    Contract,
    st.just("SYNTHETIC"),
    kernel_block_sizes=st.lists(
        st.one_of(st.integers(1, 128), st.sampled_from([16, 32, 64, 128]), st.builds(MultipleOf, st.integers(1, 64))),
        max_size=3,
    ),
    width_rule=st.sampled_from(RULES),
    min_width=st.integers(0, 300),
)
contract_lists = st.lists(st.one_of(st.sampled_from(CATALOGUE), st.sampled_from(CATALOGUE), synthetic), max_size=3)
block_sizes = st.one_of(st.integers(1, 1024), st.sampled_from([1, 8, 16, 32, 48, 64, 96, 128, 256, 544, 640, 1024]))
lengths = st.one_of(st.integers(1, 200_000), st.sampled_from([1, 127, 128, 1024, 1025, 8000, 9416, 131072]))


@settings(max_examples=4 * settings.default.max_examples)
@given(lengths, block_sizes, contract_lists, st.sampled_from([1, 1, 2, 3, 4, 8]), st.integers(0, 8), st.integers(0, 3))
def test_plan_is_the_smallest_width_that_a_search_finds(limit, block, contracts, ranks, ahead, extra):
    request = {
        "max_model_len": limit,
        "block_size": block,
        "contracts": contracts,
        "cp_size": ranks,
        "lookahead": ahead,
        "extra_blocks": extra,
    }
    found = search(limit, block, contracts, ranks, ahead, extra)
    if found is None:
        with pytest.raises(GeometryError) as caught:
            plan(**request)
        assert caught.value.values["ways_out"]
        for way in caught.value.values["ways_out"]:
            mended = plan(**request | way)
            mended.check((1, mended.kernel_width))
        return
    geometry = plan(**request)
    assert (geometry.kernel_block_size, geometry.kernel_width) == found
    ratio = block // geometry.kernel_block_size
    assert geometry.min_blocks == -(-(limit + ahead) // (block * ranks)) + extra
    assert geometry.width == geometry.kernel_width // ratio
    assert geometry.padding == geometry.kernel_width - geometry.min_blocks * ratio >= 0
    geometry.check((1, geometry.kernel_width))
    if geometry.kernel_width > 1:
        with pytest.raises((ContractError, GeometryError)):
            geometry.check((1, geometry.kernel_width - 1))


def demands(contract):
    """What decides a geometry; contracts that agree in it need one run."""
    return contract.kernel_block_sizes, contract.manager_block_sizes, contract.width_rule, contract.min_width


DISTINCT = list({demands(contract): contract for contract in CATALOGUE}.values())


@pytest.mark.parametrize("contract", DISTINCT, ids=lambda contract: f"{contract.engine}:{contract.name}")
def test_every_contract_of_the_catalogue_at_every_block_size(contract):
    for block in range(1, 1025):
        limit, ranks = 9416 + block % 7, 1 + block % 2
        found = search(limit, block, [contract], ranks, reach=129)  # one tile of single tokens
        if found is None:
            with pytest.raises(GeometryError):
                plan(max_model_len=limit, block_size=block, contracts=[contract], cp_size=ranks)
        else:
            geometry = plan(max_model_len=limit, block_size=block, contracts=[contract], cp_size=ranks)
            assert (geometry.kernel_block_size, geometry.kernel_width) == found


@given(lengths, block_sizes, st.sampled_from(known_versions("vllm")), st.sampled_from([1, 2, 4]))
def test_an_engines_width_is_refused_exactly_where_a_literal_rule_refuses_it(limit, block, version, ranks):
    geometry = plan(max_model_len=limit, block_size=block, engine=f"vllm=={version}", cp_size=ranks)
    assert geometry.kernel_width >= geometry.min_blocks == -(-limit // (block * ranks))
    for rule in RULES:
        contract = Contract("K", width_rule=rule)
        judged = plan(
            max_model_len=limit, block_size=block, engine=f"vllm=={version}", cp_size=ranks, contracts=[contract]
        )
        if literally(contract, judged.kernel_width, block, -(-limit // ranks)):
            judged.check((1, judged.kernel_width))
        else:
            with pytest.raises(ContractError):
                judged.check((1, judged.kernel_width))

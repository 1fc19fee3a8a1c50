"""KVCache against the plain-Python model: `blocktable.testing.CacheMachine` on `KVCache`."""

import pytest
from hypothesis import settings

from blocktable import NeverFits
from blocktable.cache import KVCache
from blocktable.testing.cache_machine import KINDS, MIXED, CacheMachine, Rng, groups, least_pool

TestCache = CacheMachine.TestCase
# Some 23,000 calls, half a minute; `make long` makes hundreds of thousands.
TestCache.settings = settings(
    max_examples=8 * settings.default.max_examples,
    stateful_step_count=max(48, settings.default.stateful_step_count),
)


def test_a_pool_too_small_for_one_row_is_refused_with_the_longest_that_fits() -> None:
    for seed in range(200):
        rng = Rng(seed)
        found = groups(rng, rng.choice(KINDS + MIXED))
        least = least_pool(found)
        KVCache(found, num_blocks=least + 1, max_rows=1).check()
        with pytest.raises(NeverFits) as caught:
            KVCache(found, num_blocks=least, max_rows=1)
        assert (caught.value.needed, caught.value.usable) == (least, least - 1)
        assert caught.value.remedy

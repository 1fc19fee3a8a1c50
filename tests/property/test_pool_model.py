"""The block pool against a plain-Python model, in random sequences of calls, right and wrong ones."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.errors import ArgumentError, OutOfBlocks
from blocktable.pool import BlockPool


class Model:
    """What the pool should do, one block at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.queue = deque(range(1, num_blocks))
        self.owners: Counter[int] = Counter()

    def allocate(self, n: int) -> list[int]:
        if n > len(self.queue):
            raise OutOfBlocks("short")
        ids = [self.queue.popleft() for _ in range(n)]
        self.owners.update(ids)
        return ids

    def share(self, ids: list[int]) -> None:
        if any(self.owners[i] < 1 for i in ids):
            raise ArgumentError("free")
        self.owners.update(ids)

    def free(self, ids: list[int]) -> None:
        if any(i < 1 or i >= self.num_blocks or n > self.owners[i] for i, n in Counter(ids).items()):
            raise ArgumentError("not held so often")
        for i in ids:
            self.owners[i] -= 1
            if self.owners[i] == 0:
                self.queue.append(i)


def outcome(call: object, argument: object) -> object:
    try:
        result = call(argument)  # type: ignore[operator]
    except (ArgumentError, OutOfBlocks) as error:
        return type(error)
    return None if result is None else list(map(int, result))


@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(1, 12), data=st.data())
def test_the_pool_does_what_the_model_does(num_blocks: int, data: st.DataObject) -> None:
    pool, model = BlockPool(num_blocks), Model(num_blocks)
    for _ in range(data.draw(st.integers(0, 25))):
        verb = data.draw(st.sampled_from(["allocate", "allocate", "share", "free", "free"]))
        held = [i for i, n in model.owners.items() for _ in range(n)]
        if verb == "allocate":
            argument: object = data.draw(st.integers(0, num_blocks // 2 + 1))
        elif held and data.draw(st.booleans()):
            argument = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
        else:
            argument = data.draw(st.lists(st.integers(-1, num_blocks), max_size=4))
        assert outcome(getattr(pool, verb), argument) == outcome(getattr(model, verb), argument), (verb, argument)
        assert pool.num_free == len(model.queue)
        assert pool.references.tolist() == [model.owners[i] for i in range(num_blocks)]
        pool.check()
    pool.free([i for i, n in model.owners.items() for _ in range(n)])
    assert (pool.num_free, pool.num_held) == (num_blocks - 1, 0)

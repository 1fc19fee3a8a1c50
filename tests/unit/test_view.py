"""Pictures of a cache: what they show is what its public side says, at random states, and they never change it."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable import ArgumentError, Group, KVCache, OutOfBlocks, plan, view
from blocktable.view.picture import Node, Picture


def busy_cache(seed: int, *, blocks: int = 24, windows: tuple[int, ...] = (0,), steps: int = 60) -> KVCache:
    """A cache after random calls: prompts that share beginnings, drafts, forks, fences."""
    random = np.random.default_rng(seed)
    geometry = plan(max_model_len=24, block_size=2)
    groups = [Group(geometry, kind="window", window=w) if w else Group(geometry) for w in windows]
    cache = KVCache(groups, num_blocks=blocks * len(windows), max_rows=5)
    used: list[int] = []
    for step in range(steps):
        unused = [row for row in range(5) if row not in used]
        try:
            match random.integers(5):
                case 0 | 1 if unused:
                    prompt = random.integers(0, 2, random.integers(1, 12))
                    salts = [b"s"] if random.random() < 0.2 else None
                    cache.admit(unused[:1], [0, prompt.size], prompt, salts)
                    used.append(unused[0])
                case 2 if used:
                    row = used[0]
                    cache.extend([row], [0, 3], random.integers(0, 2, 3), final=[int(cache.lengths[row])])
                case 3 if used and unused:
                    cache.fork(used[-1], unused[0])
                    used.append(unused[0])
                case 4 if used:
                    cache.free([used.pop(0)], fence=step if random.random() < 0.3 else None)
                    cache.commit()
        except (OutOfBlocks, blocktable.NeverFits):
            cache.free(used)
            used.clear()
    return cache


SEEDS = range(12)


@pytest.mark.parametrize("windows", [(0,), (0, 4)])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_pool_is_what_stats_and_tables_say(seed: int, windows: tuple[int, ...]) -> None:
    cache = busy_cache(seed, windows=windows)
    before, stats = cache.snapshot(), cache.stats()
    picture = Picture(cache)
    assert picture.counts == {name: stats[name] for name in ("free", "cached", "held", "fenced")}
    for name, count in picture.counts.items():
        assert picture.status[1:].count(name) == count
    owners: dict[int, list[int]] = {}
    for table in cache.tables.tables:
        for row, count in enumerate(table.num_blocks.tolist()):
            for block in filter(None, table.array[row, :count].tolist()):
                owners.setdefault(block, []).append(row)
    assert {block: sorted(rows) for block, rows in picture.owners.items()} == {b: sorted(r) for b, r in owners.items()}
    assert (cache.snapshot(), cache.stats()) == (before, stats)
    cache.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_map_has_a_sign_per_block(seed: int) -> None:
    cache = busy_cache(seed)
    _, *lines, legend = view.pool_map(cache).splitlines()
    signs = "".join(lines)
    stats = cache.stats()
    assert len(signs) == cache.num_blocks - 1
    assert [signs.count(sign) for sign in ".-!"] == [stats[name] for name in ("free", "cached", "fenced")]
    assert all(f"{sign} row " in legend for sign in set(signs) - set(".-!#"))


def paths(nodes: list[Node], before: tuple[Node, ...] = ()) -> Iterator[tuple[Node, ...]]:
    for node in nodes:
        path = (*before, node)
        yield path
        yield from paths(node.children, path)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tree_is_what_prompts_find(seed: int) -> None:
    """Every path of backed nodes is found in full, and what a prompt finds is a path of the tree."""
    cache = busy_cache(seed)
    picture = Picture(cache)
    seen: set[tuple[bytes, tuple[int, ...]]] = {(b"", ()), (b"s", ())}
    for salt, nodes in picture.roots:
        for path in paths(nodes):
            tokens = [token for node in path for token in node.tokens]
            backed = all(node.blocks for node in path)
            found = int(cache.lookup([0, len(tokens) + 1], [*tokens, 9], [salt])[0])
            assert (found == len(tokens)) == backed
            if backed:
                seen.add((salt, tuple(tokens)))
    random = np.random.default_rng(seed)
    for _ in range(60):
        prompt, salt = random.integers(0, 2, 12).tolist(), [b"", b"s"][random.integers(2)]
        found = int(cache.lookup([0, 12], prompt, [salt])[0])
        assert (salt, tuple(prompt[:found])) in seen


def test_a_row_is_drawn_in_its_parts() -> None:
    """50 of 70 tokens are final: two blocks of 32 hold them, a third what may be rejected."""
    geometry = plan(max_model_len=9 * 32, block_size=32, contracts=["FLASHINFER_MLA"])
    assert (geometry.min_blocks, geometry.width) == (9, 12)
    cache = KVCache([geometry], num_blocks=20, max_rows=4)
    cache.admit([1], [0, 50], np.arange(50))
    cache.extend([1], [0, 20], np.arange(20), final=[50])
    parts = Picture(cache).row(1).parts
    assert [(part.name, part.start, part.size) for part in parts] == [
        ("live", 0, 2),
        ("lookahead", 2, 1),
        ("tail", 3, 6),
        ("alignment", 9, 3),
    ]
    drawn = view.row(cache, 1)
    assert "70 tokens, 50 final, 3 blocks of 32" in drawn
    assert "\n==+......|||\n" in drawn


def test_a_window_shows_what_it_gave_up_and_a_wide_row_loses_no_part() -> None:
    geometry = plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"])
    cache = KVCache([Group(geometry, kind="window", window=64)], num_blocks=20, max_rows=4)
    cache.admit([0], [0, 300], np.arange(300))
    for _ in range(3):
        cache.extend([0], [0, 1], [5])
    drawn = view.row(cache, 0)
    strip = drawn.splitlines()[1]
    assert len(strip) <= 64
    assert set(strip) == set("x=.|")
    assert re.search(r"gone +columns 0\.\.6 ", drawn)
    assert re.search(r"alignment +columns 295\.\.295 ", drawn)


def test_a_state_row_and_one_without_tokens_are_drawn() -> None:
    geometry = plan(max_model_len=64, block_size=16)
    cache = KVCache([Group(geometry), Group(geometry, kind="state")], num_blocks=20, max_rows=4)
    cache.admit([0, 3], [0, 5, 5], np.arange(5))
    assert "row 3 (b), group 1 state: 0 tokens" in view.text(cache)
    view.html(cache)


def test_a_row_that_is_not_in_use_and_what_is_no_cache_are_refused() -> None:
    cache = busy_cache(0)
    with pytest.raises(ArgumentError, match="not in use"):
        view.row(cache, 99)
    with pytest.raises(ArgumentError, match="not in use"):
        view.row(cache, Picture(cache).used[0], group=3)
    wrong: Any = [[1, 2, 0]]
    with pytest.raises(ArgumentError, match="KVCache"):
        view.text(wrong)


def test_a_large_pool_and_a_long_prefix_are_drawn_in_a_bounded_picture() -> None:
    cache = KVCache([plan(max_model_len=65536, block_size=2)], num_blocks=40_000, max_rows=4)
    cache.admit([0], [0, 60_000], np.zeros(60_000, np.int32))
    text = view.text(cache)
    assert len(text) < 10_000
    assert "each sign stands for 10 blocks" in text
    assert "30000 tokens" not in text
    assert "60000 tokens" in text
    assert len(view.html(cache)) < 4_000_000


class Blocks(HTMLParser):
    """The signs of a page's pool, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.signs: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "i":
            self.signs.append(data)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_page_shows_the_same_signs_and_asks_for_nothing(seed: int) -> None:
    cache = busy_cache(seed)
    html = view.html(cache, "<b>")
    page = Blocks(html)
    assert page.open == []
    assert "".join(page.signs) == "".join(view.pool_map(cache).splitlines()[1:-1])
    assert "default-src 'none'" in html
    assert "<script" not in html
    assert "<b>" not in html
    assert not re.search(r"https?:", html)

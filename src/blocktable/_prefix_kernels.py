"""The prefix index: which prefixes of tokens have blocks that hold their KV.

A node is (its parent's serial, the tokens of one unit); serials are never reused and tokens are compared, so that a hit
is exact. A node's latest child is followed by comparing; only its other children are in the hash table, which finds a
candidate and decides nothing. A node stays while a block backs it or one of its descendants, or a row goes on from it;
nodes without a block form a list, and past BLOCKLESS_MOST of them the oldest is forgotten (its descendants then answer no
more, since no path leads to them).

Hashes are made of 31-bit steps, so that no product leaves 62 bits: plain Python computes the same.
"""

from blocktable._cache_layout import (
    ABSENT,
    BLOCK_FIELDS,
    BLOCKLESS,
    BLOCKLESS_MOST,
    CHAIN,
    COMPARED,
    HASHED,
    HEIRS,
    I32,
    I64,
    INDEX,
    LATEST,
    LINE_FIELDS,
    LISTS,
    MATE_NEXT,
    MATE_PREV,
    NEWER,
    NODE,
    NODE_FIELDS,
    NUM_BLOCKS,
    OLDER,
    PARENT,
    PARENT_SERIAL,
    PARTS,
    PIN,
    ROOT,
    SEAT,
    SEED,
    SERIAL,
    SERIAL_LAST,
    SLOT_FRESH,
    SLOT_TOP,
    SLOTS,
    UNIT,
    WORDS,
)
from blocktable._jit import compiled, helper, i32, i64, nothing, sealed, u64

LOW = 0x7FFFFFFF
STEP_A, STEP_B = 0x45D9F3B5, 0x5BD1E995
KIDS = PIN - 1


@helper(i64(sealed(i32[::1]), i64, i64, i64, i64, i64))
def digest(words: I32, begin: int, count: int, stride: int, serial: int, seed: int) -> int:
    """Hash ``count`` words (every ``stride``-th from ``begin``) behind a parent's serial to 31 bits.

    Of a token of two words only the lower one is hashed, so that a store that grows wider keeps its buckets.
    """
    mixed = seed ^ serial
    a: int = mixed & LOW
    b: int = (mixed >> 31) & LOW
    at = begin
    for _ in range(count // 2):
        a = ((a ^ (i64(words[at]) & LOW)) + 1) * STEP_A
        b = ((b ^ (i64(words[at + stride]) & LOW)) + 1) * STEP_B
        a = (a ^ (a >> 31)) & LOW
        b = (b ^ (b >> 31)) & LOW
        at += 2 * stride
    if count % 2:
        a = ((a ^ (i64(words[at]) & LOW)) + 1) * STEP_A
        a = (a ^ (a >> 31)) & LOW
    return (a ^ ((b * STEP_A) >> 29)) & LOW


@helper(i64(sealed(i32[::1]), i64, i64, i32[::1], i64, i64))
def same(words: I32, begin: int, stride: int, store: I32, at: int, count: int) -> int:
    """Compare ``count`` words with those of a node slot."""
    differ: int = i32(0)
    first, second, step = u64(begin), u64(at), u64(stride)  # unsigned: no index counts from the end
    if stride == 1:
        for i in range(u64(count)):
            differ |= words[first + i] ^ store[second + i]
    else:
        for i in range(u64(count)):
            differ |= words[first + i * step] ^ store[second + i]
    return differ == 0


@compiled(i64(i64[::1], i64[::1]))
def take_slot(meta: I64, nodes: I64) -> int:
    """Return a node slot that is nobody's; the caller has made sure that there is one."""
    slot: int = meta[SLOT_TOP]
    width = NODE_FIELDS + meta[PARTS]
    if slot:
        meta[SLOT_TOP] = nodes[slot * width + LATEST]
    else:
        slot = meta[SLOT_FRESH]
        meta[SLOT_FRESH] = slot + 1
    meta[SLOTS] += 1
    at = slot * width
    nodes[at + LATEST] = 0
    nodes[at + HEIRS] = 0
    nodes[at + CHAIN] = ABSENT
    nodes[at + OLDER] = ABSENT
    for part in range(meta[PARTS]):
        nodes[at + NODE_FIELDS + part] = 0
    return slot


@compiled(nothing(i64[::1], i64[::1], i64))
def give_slot(meta: I64, nodes: I64, slot: int) -> None:
    """Return a node slot; without a serial, nobody's parent."""
    at = slot * (NODE_FIELDS + meta[PARTS])
    nodes[at + SERIAL] = 0
    nodes[at + PARENT_SERIAL] = 0
    nodes[at + LATEST] = meta[SLOT_TOP]
    meta[SLOT_TOP] = slot
    meta[SLOTS] -= 1


@helper(i64(i64[::1], *INDEX[2:], i64, sealed(i32[::1]), i64, i64))
def child(meta: I64, nodes: I64, buckets: I32, store: I32, node: int, words: I32, begin: int, stride: int) -> int:
    """Return the child of a node for one unit of tokens, 0 if there is none."""
    width, count = NODE_FIELDS + meta[PARTS], meta[UNIT] * meta[WORDS]
    at = node * width
    latest: int = nodes[at + LATEST]
    known = 0
    if latest:
        known = 1
        meta[COMPARED] += meta[UNIT]
        if same(words, begin, stride, store, latest * count, count):
            return latest
    if nodes[at + HEIRS] & KIDS == known:
        return 0
    serial = nodes[at + SERIAL]
    meta[HASHED] += meta[UNIT]
    found: int = i64(
        buckets[digest(words, begin, meta[UNIT], meta[WORDS] * stride, serial, meta[SEED]) & (buckets.size - 1)]
    )
    while found:
        if nodes[found * width + PARENT_SERIAL] == serial and found != latest:
            meta[COMPARED] += meta[UNIT]
            if same(words, begin, stride, store, found * count, count):
                return found
        found = nodes[found * width + CHAIN]
    return 0


@helper(i64(i64[::1], *INDEX[2:], i64))
def bucket_of(meta: I64, nodes: I64, buckets: I32, store: I32, node: int) -> int:
    """Return the bucket that a node belongs in."""
    count = meta[UNIT] * meta[WORDS]
    meta[HASHED] += meta[UNIT]
    serial = nodes[node * (NODE_FIELDS + meta[PARTS]) + PARENT_SERIAL]
    return digest(store, node * count, meta[UNIT], meta[WORDS], serial, meta[SEED]) & (buckets.size - 1)


@helper(nothing(i64[::1], *INDEX[2:], i64, i64))
def plant(meta: I64, nodes: I64, buckets: I32, store: I32, parent: int, node: int) -> None:
    """Make a slot whose tokens are in the store the latest child of a parent; the one before moves to the table."""
    width = NODE_FIELDS + meta[PARTS]
    at, up = node * width, parent * width
    meta[SERIAL_LAST] += 1
    nodes[at + SERIAL] = meta[SERIAL_LAST]
    nodes[at + PARENT] = parent
    nodes[at + PARENT_SERIAL] = nodes[up + SERIAL]
    nodes[at + LATEST] = 0
    before = nodes[up + LATEST]
    if before and nodes[before * width + CHAIN] == ABSENT:
        bucket = bucket_of(meta, nodes, buckets, store, before)
        nodes[before * width + CHAIN] = buckets[bucket]
        buckets[bucket] = before
    nodes[up + LATEST] = node
    nodes[up + HEIRS] += 1


@helper(nothing(i64[::1], i64[::1], i64))
def list_blockless(meta: I64, nodes: I64, node: int) -> None:
    """Put a node behind those that lost their blocks before it; slot 0 is both ends of that list."""
    width = NODE_FIELDS + meta[PARTS]
    newest = nodes[OLDER]
    nodes[node * width + OLDER] = newest
    nodes[node * width + NEWER] = 0
    nodes[newest * width + NEWER] = node
    nodes[OLDER] = node
    meta[BLOCKLESS] += 1


@helper(nothing(i64[::1], i64[::1], i64))
def unlist_blockless(meta: I64, nodes: I64, node: int) -> None:
    """Take a node out of the list of those without a block, if it is in it."""
    width = NODE_FIELDS + meta[PARTS]
    at = node * width
    older = nodes[at + OLDER]
    if older == ABSENT:
        return
    newer = nodes[at + NEWER]
    nodes[older * width + NEWER] = newer
    nodes[newer * width + OLDER] = older
    nodes[at + OLDER] = ABSENT
    meta[BLOCKLESS] -= 1


@helper(i64(i64[::1], i64[::1], i64))
def backed(meta: I64, nodes: I64, node: int) -> int:
    """Say whether any block backs a node."""
    at = node * (NODE_FIELDS + meta[PARTS]) + NODE_FIELDS
    for part in range(meta[PARTS]):
        if nodes[at + part]:
            return 1
    return 0


@helper(nothing(i64[::1], *INDEX[2:], i64))
def uproot(meta: I64, nodes: I64, buckets: I32, store: I32, node: int) -> None:
    """Forget a node, and the ancestors that were there for it alone."""
    width = NODE_FIELDS + meta[PARTS]
    while True:
        at = node * width
        unlist_blockless(meta, nodes, node)
        if nodes[at + CHAIN] != ABSENT:
            bucket = bucket_of(meta, nodes, buckets, store, node)
            other = i64(buckets[bucket])
            if other == node:
                buckets[bucket] = nodes[at + CHAIN]
            else:
                while nodes[other * width + CHAIN] != node:
                    other = nodes[other * width + CHAIN]
                nodes[other * width + CHAIN] = nodes[at + CHAIN]
        parent, serial = nodes[at + PARENT], nodes[at + PARENT_SERIAL]
        give_slot(meta, nodes, node)
        up = parent * width
        if nodes[up + SERIAL] != serial:
            return  # the parent was forgotten before
        if nodes[up + LATEST] == node:
            nodes[up + LATEST] = 0
        nodes[up + HEIRS] -= 1
        if nodes[up + HEIRS] or nodes[up + PARENT_SERIAL] < 0 or backed(meta, nodes, parent):
            return
        node = parent


@helper(nothing(i64[::1], *INDEX[2:], i64))
def bereave(meta: I64, nodes: I64, buckets: I32, store: I32, node: int) -> None:
    """Decide what becomes of a node that no block backs: gone without heirs, listed without a row."""
    at = node * (NODE_FIELDS + meta[PARTS])
    heirs = nodes[at + HEIRS]
    if nodes[at + PARENT_SERIAL] < 0 or heirs >= PIN:
        return  # a salt's root, or a row goes on from here
    if heirs == 0:
        uproot(meta, nodes, buckets, store, node)
        return
    if nodes[at + OLDER] == ABSENT:
        list_blockless(meta, nodes, node)
    if meta[BLOCKLESS] > meta[BLOCKLESS_MOST]:
        uproot(meta, nodes, buckets, store, nodes[NEWER])


@helper(nothing(*INDEX, i64))
def unseat(meta: I64, blocks: I32, nodes: I64, buckets: I32, store: I32, block: int) -> None:
    """Let a block back no node any more."""
    at = block * BLOCK_FIELDS
    seat = i64(blocks[at + SEAT])
    if seat == 0:
        return
    node = seat // meta[PARTS]
    head = node * (NODE_FIELDS + meta[PARTS]) + NODE_FIELDS + seat % meta[PARTS]
    after, before = i64(blocks[at + MATE_NEXT]), i64(blocks[at + MATE_PREV])
    blocks[at + SEAT] = 0
    if after == block:
        nodes[head] = 0
        if not backed(meta, nodes, node):
            bereave(meta, nodes, buckets, store, node)
        return
    blocks[after * BLOCK_FIELDS + MATE_PREV] = before
    blocks[before * BLOCK_FIELDS + MATE_NEXT] = after
    if nodes[head] == block:
        nodes[head] = after


@helper(nothing(*LISTS, i64[::1], i64, i64, i64))
def take_seat(meta: I64, blocks: I32, nodes: I64, node: int, part: int, block: int) -> None:
    """Let a block back a part of a node, behind those that do already."""
    at = block * BLOCK_FIELDS
    head = node * (NODE_FIELDS + meta[PARTS]) + NODE_FIELDS + part
    blocks[at + SEAT] = node * meta[PARTS] + part
    first = nodes[head]
    if first == 0:
        unlist_blockless(meta, nodes, node)
        nodes[head] = block
        blocks[at + MATE_NEXT] = block
        blocks[at + MATE_PREV] = block
        return
    last = i64(blocks[first * BLOCK_FIELDS + MATE_PREV])
    blocks[last * BLOCK_FIELDS + MATE_NEXT] = block
    blocks[at + MATE_PREV] = last
    blocks[at + MATE_NEXT] = first
    blocks[first * BLOCK_FIELDS + MATE_PREV] = block


@helper(nothing(i64[::1], *INDEX[2:], i64, i64))
def go_on_from(meta: I64, nodes: I64, buckets: I32, store: I32, node: int, before: int) -> None:
    """Let a row that went on from node ``before`` go on from ``node``; either may be 0 for none."""
    width = NODE_FIELDS + meta[PARTS]
    if node == before:
        return
    if node:
        nodes[node * width + HEIRS] += PIN
        unlist_blockless(meta, nodes, node)
    if before:
        nodes[before * width + HEIRS] -= PIN
        if not backed(meta, nodes, before):
            bereave(meta, nodes, buckets, store, before)


@helper(nothing(*LISTS, i64[::1], i32[::1], i64[::1]))
def forget_all(meta: I64, blocks: I32, nodes: I64, buckets: I32, lines: I64) -> None:
    """Forget every node; rows in use index nothing any more, since their history would be missing."""
    width = NODE_FIELDS + meta[PARTS]
    for block in range(meta[NUM_BLOCKS]):
        blocks[block * BLOCK_FIELDS + SEAT] = 0
    for bucket in range(buckets.size):
        buckets[bucket] = 0
    for slot in range(1, meta[SLOT_FRESH]):
        at = slot * width
        if nodes[at + SERIAL] and nodes[at + PARENT_SERIAL] >= 0:
            give_slot(meta, nodes, slot)
        elif nodes[at + SERIAL]:
            nodes[at + LATEST] = 0
            nodes[at + HEIRS] = 0
    nodes[OLDER] = 0
    nodes[NEWER] = 0
    meta[BLOCKLESS] = 0
    for line in range(0, lines.size, LINE_FIELDS):
        root = lines[line + ROOT]
        if root == 0:
            continue
        nodes[root * width + HEIRS] += PIN
        lines[line + NODE] = 0

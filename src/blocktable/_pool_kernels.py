"""The pool: a block leaves it for an owner, comes back from its last one, and waits in between as its content deserves.

Blocks that hold nothing known are handed out first, the last returned before any other; then the idle blocks of the
prefix index, the longest idle first. Both lists are threaded through the blocks, so that a hit takes an idle block out
in O(1). Block 0 is both ends of the idle list; block NUM_BLOCKS, which is none, of the list of those that a step or a copy
may still read. Both lists are in the order in which their blocks lost the last owner, so that a block that had to wait
takes the place in the idle list that it would have had without.
"""

from blocktable import _prefix_kernels as index
from blocktable._cache_layout import (
    BLOCK_FIELDS,
    CACHED,
    CLOCK,
    COPIES,
    EVICTIONS,
    FENCE,
    FENCED,
    FREE,
    FREE_TOP,
    FRESH,
    HELD,
    I32,
    I64,
    INDEX,
    LISTS,
    LOW31,
    NEXT,
    NUM_BLOCKS,
    PINS,
    POPPED,
    PREV,
    PUSHED,
    REF,
    RETIRED,
    SEAT,
    TARGET,
)
from blocktable._checksums import DELTA
from blocktable._jit import compiled, helper, i32, i64, nothing
from blocktable._journal import note_commit, note_copies


@helper(nothing(i32[::1], i64, i64))
def link_before(blocks: I32, block: int, after: int) -> None:
    """Put a block in front of another one of a list."""
    before = i64(blocks[after * BLOCK_FIELDS + PREV])
    blocks[block * BLOCK_FIELDS + NEXT] = after
    blocks[block * BLOCK_FIELDS + PREV] = before
    blocks[before * BLOCK_FIELDS + NEXT] = block
    blocks[after * BLOCK_FIELDS + PREV] = block


@helper(nothing(i32[::1], i64))
def unlink(blocks: I32, block: int) -> None:
    """Take a block out of its list."""
    after, before = i64(blocks[block * BLOCK_FIELDS + NEXT]), i64(blocks[block * BLOCK_FIELDS + PREV])
    blocks[before * BLOCK_FIELDS + NEXT] = after
    blocks[after * BLOCK_FIELDS + PREV] = before


@helper(i64(*LISTS, i64, i64))
def settle(meta: I64, blocks: I32, block: int, after: int) -> int:
    """Put a block that nobody holds or reads where it may be reissued from.

    In the idle list that is before ``after``, which lost its last owner later (0: the end), and before those that
    did so too; returns what the block stands before then, or itself, to begin from with an older one.
    """
    meta[PUSHED] += 1
    at = block * BLOCK_FIELDS
    if blocks[at + SEAT] == 0:
        blocks[at + NEXT] = meta[FREE_TOP]
        meta[FREE_TOP] = block
        meta[FREE] += 1
        return after
    before = i64(blocks[after * BLOCK_FIELDS + PREV])
    while before and blocks[before * BLOCK_FIELDS + REF] < blocks[at + REF]:
        after = before
        before = i64(blocks[after * BLOCK_FIELDS + PREV])
    link_before(blocks, block, after)
    meta[CACHED] += 1
    return block


@helper(nothing(*LISTS))
def count_anew(meta: I64, blocks: I32) -> None:
    """Start the clock again before it leaves 32 bits: number the idle and the fenced blocks in the order they are in."""
    end, clock = meta[NUM_BLOCKS], i64(0)
    idle, fenced = i64(blocks[NEXT]), i64(blocks[end * BLOCK_FIELDS + NEXT])
    while idle or fenced != end:
        if fenced == end or (idle and blocks[idle * BLOCK_FIELDS + REF] > blocks[fenced * BLOCK_FIELDS + REF]):
            block = idle
            idle = i64(blocks[block * BLOCK_FIELDS + NEXT])
        else:
            block = fenced
            fenced = i64(blocks[block * BLOCK_FIELDS + NEXT])
        clock += 1
        blocks[block * BLOCK_FIELDS + REF] = -clock
    meta[CLOCK] = clock


@helper(i64(*INDEX))
def pop(meta: I64, blocks: I32, nodes: I64, buckets: I32, store: I32) -> int:
    """Hand out a block to its first owner; the caller has made sure that there is one."""
    if meta[FREE]:
        meta[FREE] -= 1
        block: int = meta[FREE_TOP]
        if block:
            meta[FREE_TOP] = blocks[block * BLOCK_FIELDS + NEXT]
        else:
            block = meta[FRESH]
            meta[FRESH] = block + 1
    else:
        block = i64(blocks[NEXT])
        unlink(blocks, block)
        meta[CACHED] -= 1
        meta[EVICTIONS] += 1
        index.unseat(meta, blocks, nodes, buckets, store, block)
    blocks[block * BLOCK_FIELDS + REF] = 1
    meta[HELD] += 1
    meta[POPPED] += 1
    return block


@helper(nothing(*LISTS, i64))
def adopt(meta: I64, blocks: I32, block: int) -> None:
    """Give a block one more owner; if it had none, it leaves the place where it waited."""
    at = block * BLOCK_FIELDS
    if blocks[at + REF] > 0:
        blocks[at + REF] += 1
        return
    unlink(blocks, block)
    if blocks[at + PINS] or blocks[at + FENCE] > meta[RETIRED]:
        meta[FENCED] -= 1
    else:
        meta[CACHED] -= 1
    blocks[at + REF] = 1
    meta[HELD] += 1


@helper(nothing(*LISTS, i64))
def unpin(meta: I64, blocks: I32, block: int) -> None:
    """Note that one pending copy from a block is done or called off."""
    at = block * BLOCK_FIELDS
    blocks[at + PINS] -= 1
    if blocks[at + PINS] == 0 and blocks[at + REF] <= 0 and blocks[at + FENCE] <= meta[RETIRED]:
        unlink(blocks, block)
        meta[FENCED] -= 1
        settle(meta, blocks, block, 0)


@helper(i64(*LISTS, i64))
def at_rest(meta: I64, blocks: I32, block: int) -> int:
    """Say whether a block has no owner and nobody still reads it: 1 if it can be reissued, else 0."""
    at = block * BLOCK_FIELDS
    if blocks[at + REF] > 0 or blocks[at + FENCE] > meta[RETIRED]:
        return 0
    return 1 if blocks[at + PINS] == 0 or blocks[at + PINS] == TARGET else 0


@helper(i64(i32[::1], i64))
def source_of(copies: I32, block: int) -> int:
    """Return the source of the pending copy to a block."""
    at = 0
    while copies[at + 2] != block:
        at += 3
    source: int = i64(copies[at + 1])
    return source


@helper(nothing(*LISTS, i32[::1], i64))
def call_off(meta: I64, blocks: I32, copies: I32, block: int) -> None:
    """Drop the pending copy to a block whose only owner gave it back."""
    blocks[block * BLOCK_FIELDS + PINS] -= TARGET
    source = source_of(copies, block)
    found = 0
    for at in range(0, 3 * meta[COPIES], 3):
        if found:
            copies[at - 3] = copies[at]
            copies[at - 2] = copies[at + 1]
            copies[at - 1] = copies[at + 2]
        elif copies[at + 2] == block:
            found = 1
    meta[COPIES] -= 1
    unpin(meta, blocks, source)


@helper(nothing(*LISTS, i32[::1], i64, i64))
def release(meta: I64, blocks: I32, copies: I32, block: int, fence: int) -> None:
    """Take one owner from a block; ``fence`` (0: none) is the step that may still read it."""
    at = block * BLOCK_FIELDS
    blocks[at + FENCE] = max(fence, i64(blocks[at + FENCE]))
    blocks[at + REF] -= 1
    if blocks[at + REF]:
        return
    meta[HELD] -= 1
    if meta[CLOCK] == LOW31:
        count_anew(meta, blocks)
    meta[CLOCK] += 1
    blocks[at + REF] = -meta[CLOCK]
    if blocks[at + PINS] >= TARGET:
        call_off(meta, blocks, copies, block)
    if blocks[at + PINS] or blocks[at + FENCE] > meta[RETIRED]:
        link_before(blocks, block, meta[NUM_BLOCKS])
        meta[FENCED] += 1
    else:
        settle(meta, blocks, block, 0)


@compiled(nothing(*LISTS, i64))
def retire(meta: I64, blocks: I32, fence: int) -> None:
    """Let the blocks of every fence up to this one be reissued; the newest first, so that both lists are walked once."""
    end, after = meta[NUM_BLOCKS], i64(0)
    meta[RETIRED] = fence
    block = i64(blocks[end * BLOCK_FIELDS + PREV])
    while block != end:
        at = block * BLOCK_FIELDS
        before = i64(blocks[at + PREV])
        if blocks[at + PINS] == 0 and blocks[at + FENCE] <= fence:
            unlink(blocks, block)
            meta[FENCED] -= 1
            after = settle(meta, blocks, block, after)
        block = before


@compiled(nothing(*LISTS, i32[::1], i64[::1], *DELTA[:2]))
def copied(meta: I64, blocks: I32, copies: I32, journal: I64, spans: I32, values: I32) -> None:
    """Have every pending copy leave with a commit, which is noted with them, if at all."""
    if journal.size:
        note_commit(journal, spans, values)
        note_copies(journal, copies[: 3 * meta[COPIES]])
    for at in range(0, 3 * meta[COPIES], 3):
        blocks[copies[at + 2] * BLOCK_FIELDS + PINS] -= TARGET
        unpin(meta, blocks, i64(copies[at + 1]))
    meta[COPIES] = 0


@compiled(nothing(*LISTS, i64[::1], i32[::1], i64[::1]))
def forget_all(meta: I64, blocks: I32, nodes: I64, buckets: I32, lines: I64) -> None:
    """Forget every prefix, and move the idle blocks, which back none any more, to the stack of free ones."""
    index.forget_all(meta, blocks, nodes, buckets, lines)
    block = i64(blocks[NEXT])
    while block:
        after = i64(blocks[block * BLOCK_FIELDS + NEXT])
        blocks[block * BLOCK_FIELDS + NEXT] = meta[FREE_TOP]
        meta[FREE_TOP] = block
        block = after
    blocks[NEXT] = 0
    blocks[PREV] = 0
    meta[FREE] += meta[CACHED]
    meta[CACHED] = 0

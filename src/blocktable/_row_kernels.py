"""One row of a cache: what a verb does to it once it is known to fit.

    position  0 ........... BASE ............ FINAL ............ LENGTH
              | in nodes    | in drafts, known and computed | in drafts, drafted or not yet known |

A unit leaves the drafts as soon as it lies wholly below FINAL: it becomes a node, or joins the one there is, and the
row's blocks of that unit back it.
"""

from blocktable._cache_layout import (
    ABSENT,
    BLOCK_FIELDS,
    CACHED,
    CLOCK,
    COPIES,
    DENSE,
    FENCE,
    FINAL,
    FIXED,
    FREE,
    FREE_TOP,
    HEAD,
    HEIRS,
    HELD,
    I32,
    I64,
    INDEX,
    LATEST,
    LENGTH,
    LINE_FIELDS,
    LISTS,
    LOW31,
    NEXT,
    NODE,
    NODE_FIELDS,
    OLDER,
    PARTS,
    PIN,
    PINS,
    POPPED,
    PREV,
    PUSHED,
    RANK,
    REACH,
    REF,
    RETIRED,
    SEAT,
    SEAT_BASE,
    SHARED,
    SPAN,
    TAIL,
    TAIL_AT,
    TARGET,
    TIP,
    UNIT,
    WORDS,
)
from blocktable._cache_layout import (
    BASE as DONE,
)
from blocktable._jit import helper, i32, i64, nothing, sealed, u64
from blocktable._kernels import (
    BASE,
    BLOCK,
    CHUNKED,
    COUNT,
    CP,
    FULL,
    GONE,
    INTERLEAVE,
    KIND,
    ROWS,
    STATE,
    STATE_FIELDS,
    WIDTH,
    WINDOW,
    cut,
    fill_null,
    touch,
)
from blocktable._pool_kernels import count_anew, pop, release
from blocktable._prefix_kernels import child, give_slot, go_on_from, list_blockless, plant, take_seat, take_slot, unseat

TABLES = (i64[:, ::1], i32[::1], i32[::1], i32[:, ::1])  # info, state, entries, dirty
TEXT = (sealed(i32[::1]), i64, i64)  # words, the first word, words from one to the next (0: all tokens unknown)


@helper(i64(i64[:, ::1], i64, i64))
def dead(info: I64, group: int, mark: int) -> int:
    """Return how many leading blocks a group no longer reads once ``mark`` tokens are final."""
    kind, reach = info[group, KIND], info[group, REACH]
    tokens: int = i64(0)
    if kind == WINDOW:
        tokens = mark - reach + 1
    elif kind == CHUNKED:
        tokens = mark // reach * reach
    if tokens <= 0:
        return 0
    span: int = info[group, SPAN]
    return tokens // span


@helper(i64(i64[:, ::1], i64, i64))
def columns(info: I64, group: int, tokens: int) -> int:
    """Return how many entries a row of so many tokens has."""
    fixed: int = info[group, FIXED]
    if info[group, KIND] == STATE:
        return fixed if tokens else 0
    span: int = info[group, SPAN]
    return (tokens + span - 1) // span


@helper(nothing(*TABLES, *LISTS, i32[::1], i64, i64))
def advance(
    info: I64, state: I32, entries: I32, dirty: I32, meta: I64, blocks: I32, copies: I32, row: int, mark: int
) -> None:
    """Give back the blocks that windows and chunks left behind, the last of them first."""
    total = info[info.shape[0] - 1, ROWS]
    for group in range(info.shape[0] - 1):
        if info[group, KIND] == FULL or info[group, KIND] == STATE:
            continue
        line = (group * total + row) * STATE_FIELDS
        gone, end = i64(state[line + GONE]), dead(info, group, mark)
        if end <= gone:
            continue
        start = info[group, BASE] + row * info[group, WIDTH]
        for column in range(end - 1, gone - 1, -1):
            release(meta, blocks, copies, i64(entries[start + column]), 0)
        fill_null(entries, start + gone, start + end)
        touch(info, state, dirty, group, row, line, gone, end)
        state[line + GONE] = end


@helper(nothing(*TABLES, *INDEX, i32[::1], i64, i64, i64))
def replace_shared(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    buckets: I32,
    store: I32,
    copies: I32,
    group: int,
    row: int,
    column: int,
) -> None:
    """Make an entry one that its row may write: a copy where another row holds the block, no node's in any case."""
    at = info[group, BASE] + row * info[group, WIDTH] + column
    block = i64(entries[at])
    if blocks[block * BLOCK_FIELDS + REF] == 1:
        unseat(meta, blocks, nodes, buckets, store, block)
        return
    fresh = pop(meta, blocks, nodes, buckets, store)
    entries[at] = fresh
    line = (group * info[info.shape[0] - 1, ROWS] + row) * STATE_FIELDS
    if column == state[line + COUNT] - 1:
        state[line + TIP] = fresh
    touch(info, state, dirty, group, row, line, column, column + 1)
    pending = 3 * meta[COPIES]
    copies[pending] = group
    copies[pending + 1] = block
    copies[pending + 2] = fresh
    meta[COPIES] += 1
    blocks[block * BLOCK_FIELDS + PINS] += 1
    blocks[fresh * BLOCK_FIELDS + PINS] += TARGET
    release(meta, blocks, copies, block, 0)


@helper(nothing(*TABLES, *INDEX, i32[::1], i64, i64))
def own(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    buckets: I32,
    store: I32,
    copies: I32,
    row: int,
    length: int,
) -> None:
    """Let a row alone hold what it writes next: the block that position ``length`` lies in, and all state blocks."""
    total = info[info.shape[0] - 1, ROWS]
    for group in range(info.shape[0] - 1):
        live = i64(state[(group * total + row) * STATE_FIELDS + COUNT])
        first, end = length // info[group, SPAN], live
        if info[group, KIND] == STATE:
            first = i64(0)
        for column in range(first, end):
            replace_shared(info, state, entries, dirty, meta, blocks, nodes, buckets, store, copies, group, row, column)


@helper(nothing(i32[::1], i64, sealed(i32[::1]), i64, i64, i64))
def copy_words(store: I32, target: int, words: I32, source: int, count: int, stride: int) -> None:
    """Copy ``count`` words, every ``stride``-th from ``source``, to where a node slot keeps its tokens."""
    to, start, step = u64(target), u64(source), u64(stride)  # unsigned: no index counts from the end
    if stride == 1:
        for i in range(u64(count)):
            store[to + i] = words[start + i]
    else:
        for i in range(u64(count)):
            store[to + i] = words[start + i * step]


@helper(nothing(i64[::1], i64[::1], i32[::1], i64[::1], i64, i64, i64, *TEXT))
def put(
    meta: I64, nodes: I64, store: I32, lines: I64, row: int, begin: int, end: int, words: I32, at: int, stride: int
) -> None:
    """Write tokens at the positions begin .. end - 1, in drafts that there are and in new ones behind them."""
    unit, per = meta[UNIT], meta[WORDS]
    width = NODE_FIELDS + meta[PARTS]
    line = row * LINE_FIELDS
    slot, low = lines[line + TAIL], lines[line + TAIL_AT]
    if slot and begin < low:  # inside the chain: from its head on
        slot, low = lines[line + HEAD], lines[line + DONE]
        while begin >= low + unit:
            slot = nodes[slot * width + LATEST]
            low += unit
    while begin < end:
        if slot == 0 or begin == low + unit:
            after = i64(0)
            if slot:
                after = nodes[slot * width + LATEST]
            if after == 0:
                after = take_slot(meta, nodes)
                if slot:
                    nodes[slot * width + LATEST] = after
                else:
                    lines[line + HEAD] = after
                lines[line + TAIL] = after
                lines[line + TAIL_AT] = begin
            slot, low = after, begin
        count = min(end, low + unit) - begin
        copy_words(store, (slot * unit + begin - low) * per, words, at, count * per, stride)
        at += count * per * stride
        begin += count


@helper(i64(i64[::1], i64[::1], i32[::1], i64[::1], i64, i64, i64, *TEXT))
def first_unknown(
    meta: I64, nodes: I64, store: I32, lines: I64, row: int, begin: int, end: int, words: I32, at: int, stride: int
) -> int:
    """Return the first of the positions begin .. end - 1 that neither the words given nor the drafts know, else end."""
    unit, per = meta[UNIT], meta[WORDS]
    width = NODE_FIELDS + meta[PARTS]
    slot, low = lines[row * LINE_FIELDS + HEAD], lines[row * LINE_FIELDS + DONE]
    sign = (per - 1) * stride
    for position in range(begin, end):
        while position >= low + unit:
            slot = nodes[slot * width + LATEST]
            low += unit
        if words[at + sign] < 0 and store[(slot * unit + position - low + 1) * per - 1] < 0:
            return position
        at += per * stride
    return end


@helper(nothing(i64[:, ::1], i32[::1], *INDEX, i64[::1], i64, i64))
def settle_final(
    info: I64,
    entries: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    buckets: I32,
    store: I32,
    lines: I64,
    row: int,
    final: int,
) -> None:
    """Raise the final mark; units wholly below it leave the drafts, for the index if the row's history is in it."""
    unit, parts = meta[UNIT], meta[PARTS]
    width, words = NODE_FIELDS + parts, unit * meta[WORDS]
    line = row * LINE_FIELDS
    lines[line + FINAL] = final
    done, before, draft = lines[line + DONE], lines[line + NODE], lines[line + HEAD]
    node = before
    if done + unit > final:
        return
    index = done // unit
    while done + unit <= final:
        after = nodes[draft * width + LATEST]
        if node == 0:
            give_slot(meta, nodes, draft)
        else:
            found = i64(0)
            if nodes[node * width + HEIRS] % PIN:
                found = child(meta, nodes, buckets, store, node, store, draft * words, 1)
            if found:
                give_slot(meta, nodes, draft)
            else:
                found = draft
                plant(meta, nodes, buckets, store, node, found)
            bare = i64(0)
            for group in range(info.shape[0] - 1):
                dense = info[group, DENSE]
                at = info[group, BASE] + row * info[group, WIDTH] + index * dense
                for part in range(dense):
                    block = i64(entries[at + part])
                    seat = info[group, SEAT_BASE] + part
                    if block and blocks[block * BLOCK_FIELDS + SEAT] == 0:
                        take_seat(meta, blocks, nodes, found, seat, block)
                    elif nodes[found * width + NODE_FIELDS + seat] == 0:
                        bare += 1
            if bare == parts and nodes[found * width + OLDER] == ABSENT and nodes[found * width + HEIRS] < PIN:
                list_blockless(meta, nodes, found)
            node = found
        draft = after
        done += unit
        index += 1
    go_on_from(meta, nodes, buckets, store, node, before)
    lines[line + DONE] = done
    lines[line + NODE] = node
    lines[line + HEAD] = draft
    if draft == 0:
        lines[line + TAIL] = 0


@helper(i64(i64, i64, i64, i64, i64))
def owned(first: int, offset: int, chunk: int, ranks: int, rank: int) -> int:
    """Return the slot of an offset in a block shared by ``ranks``, or -1 where another rank owns it (L13)."""
    turn = offset // chunk
    if turn % ranks != rank:
        return -1
    return first + turn // ranks * chunk + offset % chunk


@helper(nothing(i64[:, ::1], i32[::1], i64[::1], i64, i64, i64, i64, i64[:, ::1], i64))
def write_slots(
    info: I64, entries: I32, meta: I64, group: int, row: int, begin: int, end: int, out: I64, at: int
) -> None:
    """Write a group's slots of the positions begin .. end - 1 of a row to columns ``at`` on."""
    if info[group, KIND] == STATE:
        for token in range(end - begin):
            out[group, at + token] = -1
        return
    span, block, ranks, chunk = info[group, SPAN], info[group, BLOCK], info[group, CP], info[group, INTERLEAVE]
    start = info[group, BASE] + row * info[group, WIDTH]
    position, column = begin, begin // span
    offset = begin - column * span
    while position < end:
        first = i64(entries[start + column]) * block
        count = min(span - offset, end - position)
        to = u64(at + position - begin)
        if ranks == 1:
            for token in range(u64(count)):
                out[group, to + token] = first + offset + i64(token)
        else:
            for token in range(count):
                out[group, at + position - begin + token] = owned(first, offset + token, chunk, ranks, meta[RANK])
        position += count
        column += 1
        offset = i64(0)


@helper(nothing(*TABLES, *INDEX, i64, i64))
def supply(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    buckets: I32,
    store: I32,
    row: int,
    end: int,
) -> None:
    """Give a row the blocks that ``end`` tokens take, in every group."""
    total = info[info.shape[0] - 1, ROWS]
    for group in range(info.shape[0] - 1):
        here = (group * total + row) * STATE_FIELDS
        live, want = i64(state[here + COUNT]), columns(info, group, end)
        if want > live:
            start = info[group, BASE] + row * info[group, WIDTH]
            block = i64(0)
            for column in range(live, want):
                block = meta[FREE_TOP]
                if block == 0 or meta[FREE] == 0:
                    block = pop(meta, blocks, nodes, buckets, store)
                else:  # as pop does, without a call
                    meta[FREE_TOP] = blocks[block * BLOCK_FIELDS + NEXT]
                    blocks[block * BLOCK_FIELDS + REF] = 1
                    meta[FREE] -= 1
                    meta[HELD] += 1
                    meta[POPPED] += 1
                entries[start + column] = block
            touch(info, state, dirty, group, row, here, live, want)
            state[here + COUNT] = want
            state[here + TIP] = block


@helper(nothing(*TABLES, *INDEX, i64[::1], i32[::1], i64, i64, i64, *TEXT, i64[:, ::1], i64))
def serve(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    buckets: I32,
    store: I32,
    lines: I64,
    copies: I32,
    row: int,
    end: int,
    final: int,
    words: I32,
    at: int,
    stride: int,
    out: I64,
    to: int,
) -> None:
    """Lengthen a row to ``end`` tokens: windows move on, blocks come, tokens and slots are written, nodes are made."""
    line = row * LINE_FIELDS
    length = lines[line + LENGTH]
    advance(info, state, entries, dirty, meta, blocks, copies, row, lines[line + FINAL])
    if end > length:
        if lines[line + SHARED]:
            own(info, state, entries, dirty, meta, blocks, nodes, buckets, store, copies, row, length)
            lines[line + SHARED] = 0
        supply(info, state, entries, dirty, meta, blocks, nodes, buckets, store, row, end)
        put(meta, nodes, store, lines, row, length, end, words, at, stride)
        for group in range(info.shape[0] - 1):
            write_slots(info, entries, meta, group, row, length, end, out, to)
        lines[line + LENGTH] = end
    settle_final(info, entries, meta, blocks, nodes, buckets, store, lines, row, final)


@helper(nothing(i64[::1], i64[::1], i64[::1], i64, i64))
def drop_drafts(meta: I64, nodes: I64, lines: I64, row: int, length: int) -> None:
    """Give back the drafts that hold no position below ``length``, which is not below BASE."""
    unit, width = meta[UNIT], NODE_FIELDS + meta[PARTS]
    line = row * LINE_FIELDS
    draft, low, last = lines[line + HEAD], lines[line + DONE], i64(0)
    while draft and low < length:
        last = draft
        draft = nodes[draft * width + LATEST]
        low += unit
    while draft:
        after = nodes[draft * width + LATEST]
        give_slot(meta, nodes, draft)
        draft = after
    lines[line + TAIL] = last
    if last:
        nodes[last * width + LATEST] = 0
        lines[line + TAIL_AT] = low - unit
    else:
        lines[line + HEAD] = 0


@helper(nothing(*TABLES, *LISTS, i32[::1], i64, i64, i64))
def give_back(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    meta: I64,
    blocks: I32,
    copies: I32,
    row: int,
    length: int,
    fence: int,
) -> None:
    """Give back the blocks that a row of ``length`` tokens does not need, the last of them first."""
    total, retired = info[info.shape[0] - 1, ROWS], meta[RETIRED]
    for group in range(info.shape[0] - 1):
        line = (group * total + row) * STATE_FIELDS
        live, want = i64(state[line + COUNT]), columns(info, group, length)
        if want >= live:
            continue
        start = info[group, BASE] + row * info[group, WIDTH]
        if meta[CLOCK] + live > LOW31:
            count_anew(meta, blocks)
        for column in range(live - 1, want - 1, -1):
            block = i64(entries[start + column]) & LOW31
            at = block * BLOCK_FIELDS
            if block == 0:
                continue
            if fence or blocks[at + REF] != 1 or blocks[at + PINS] or blocks[at + FENCE] > retired:
                release(meta, blocks, copies, block, fence)
                continue
            meta[CLOCK] += 1
            blocks[at + REF] = -meta[CLOCK]  # as release and settle do, without a call
            meta[HELD] -= 1
            meta[PUSHED] += 1
            if blocks[at + SEAT]:
                before = i64(blocks[PREV]) & LOW31
                blocks[at + NEXT] = 0
                blocks[at + PREV] = before
                blocks[before * BLOCK_FIELDS + NEXT] = block
                blocks[PREV] = block
                meta[CACHED] += 1
            else:
                blocks[at + NEXT] = meta[FREE_TOP]
                meta[FREE_TOP] = block
                meta[FREE] += 1
        cut(info, state, entries, dirty, group, row, line, want)
        state[line + TIP] = entries[start + want - 1] if want else 0

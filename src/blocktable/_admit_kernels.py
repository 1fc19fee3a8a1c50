"""Finding a prompt's prefix in the index, and taking a row into use on top of it."""

from typing import Any

from blocktable._cache_layout import (
    AVAILABLE,
    BAD_FINAL,
    BAD_LIMIT,
    BLOCK_FIELDS,
    CACHED,
    COMPARED,
    DENSE,
    FENCE,
    FINAL,
    FREE,
    GROW,
    HASHED,
    HEIRS,
    HELD,
    HIT_TOKENS,
    I32,
    I64,
    IN_USE,
    INDEX,
    INDEXED,
    JOURNAL_FULL,
    LARGEST,
    LATEST,
    LENGTH,
    LINE_FIELDS,
    LOW31,
    NEEDED,
    NEVER,
    NEXT,
    NO_LIMIT,
    NODE,
    NODE_FIELDS,
    PARTS,
    PIN,
    PINS,
    PREV,
    QUERY_TOKENS,
    REF,
    RETIRED,
    ROOT,
    SAVE,
    SEAT_BASE,
    SERVED,
    SHORT_OF_BLOCKS,
    SLOTS,
    TIP,
    TOKENS,
    UNIT,
    UNKNOWN_TOKEN,
    WORDS,
)
from blocktable._cache_layout import (
    BASE as DONE,
)
from blocktable._extend_kernels import CACHE, open_row, scan
from blocktable._jit import compiled, helper, i32, i64, nothing, sealed
from blocktable._journal import ADMIT as KIND_ADMIT
from blocktable._journal import LOOKUP as KIND_LOOKUP
from blocktable._journal import OUT_OF_BLOCKS, REFUSED, has_room, note_prompts, room_of_prompts
from blocktable._kernels import (
    BAD_INDPTR,
    BASE,
    COUNT,
    FULL,
    GONE,
    KIND,
    OK,
    ROWS,
    STATE_FIELDS,
    WIDTH,
    check_rows,
    refuse,
    touch,
)
from blocktable._pool_kernels import adopt, at_rest
from blocktable._prefix_kernels import backed, child, go_on_from, same
from blocktable._row_kernels import TEXT, columns, dead, serve

LOOKUP, MATCH, ADMIT = range(3)
RUN = 32  # units compared at once, where their tokens lie one after another


@helper(i64(i64[::1], i64[::1], i32[::1], i64, *TEXT, i64, i64, i64[::1]))
def follow(
    meta: I64, nodes: I64, store: I32, node: int, words: I32, at: int, stride: int, units: int, most: int, path: I64
) -> int:
    """Go on from a node ``units`` deep, to latest children that continue the prompt and have every block.

    Returns how deep that leads. The nodes of a prompt registered in one go lie in a row, and so do their tokens: a run
    of them is one comparison.
    """
    parts = meta[PARTS]
    width, count = NODE_FIELDS + parts, meta[UNIT] * meta[WORDS]
    deep: int = units
    while deep < most:
        head = nodes[node * width + LATEST]
        if head == 0:
            break
        run, limit = i64(1), min(most - deep, i64(RUN))
        while run < limit and nodes[(head + run - 1) * width + LATEST] == head + run:
            run += 1
        while run and not same(words, at, stride, store, head * count, run * count):
            run //= 2
        if run == 0:
            break
        meta[COMPARED] += run * meta[UNIT]
        at += run * count * stride
        for following in range(head, head + run):
            for part in range(parts):
                if nodes[following * width + NODE_FIELDS + part] == 0:
                    return deep
            path[deep] = following
            deep += 1
        node = head + run - 1
    return deep


@helper(i64(i64[:, ::1], i64[::1], *INDEX[2:], i64, *TEXT, i64, i64[::1]))
def walk(
    info: I64,
    meta: I64,
    nodes: I64,
    buckets: I32,
    store: I32,
    root: int,
    words: I32,
    at: int,
    stride: int,
    count: int,
    path: I64,
) -> int:
    """Return the units of the longest prefix of ``count`` tokens that every group can serve; their nodes go to ``path``.

    The last token is left to compute. A full group needs the blocks of every unit; a windowed one those that it still
    reads behind the prefix, so its first column without a gap up to here is kept at the end of ``path``.
    """
    groups = info.shape[0] - 1
    width, words_of = NODE_FIELDS + meta[PARTS], meta[UNIT] * meta[WORDS]
    step = words_of * stride
    spare = path.size - groups
    for group in range(groups):
        path[spare + group] = 0
    most = min((count - 1) // meta[UNIT], spare)
    best: int = i64(0)
    index, node = i64(0), root
    while index < most:
        if index == best:  # without a gap so far
            best = follow(meta, nodes, store, node, words, at, stride, index, most, path)
            if best > index:
                at += (best - index) * step
                index, node = best, path[best - 1]
                continue
        node = child(meta, nodes, buckets, store, node, words, at, stride)
        if node == 0:
            break
        path[index] = node
        at += step
        index += 1
        whole = True
        usable = backed(meta, nodes, node) or nodes[node * width + HEIRS] % PIN  # else only a row keeps it
        for group in range(groups):
            dense = info[group, DENSE]
            seat = node * width + NODE_FIELDS + info[group, SEAT_BASE]
            for part in range(dense):
                if nodes[seat + part] == 0:
                    if info[group, KIND] == FULL:
                        whole = False
                    path[spare + group] = (index - 1) * dense + part + 1
            if info[group, KIND] != FULL and dead(info, group, index * meta[UNIT]) < path[spare + group]:
                usable = 0
        if not whole:
            break
        if usable:
            best = index
    return best


@helper(i64(i64[:, ::1], *INDEX[:3], i64, i64[::1]))
def idle_in(info: I64, meta: I64, blocks: I32, nodes: I64, units: int, path: I64) -> int:
    """Return how many blocks of a prefix that was found would leave the idle list if a row adopted it."""
    width = NODE_FIELDS + meta[PARTS]
    idle: int = i64(0)
    for group in range(info.shape[0] - 1):
        dense = info[group, DENSE]
        if dense == 0:
            continue
        column = dead(info, group, units * meta[UNIT])
        for index in range(column // dense, units):
            seat = path[index] * width + NODE_FIELDS + info[group, SEAT_BASE] - index * dense
            while column < (index + 1) * dense:
                idle += at_rest(meta, blocks, nodes[seat + column])
                column += 1
    return idle


@helper(nothing(*CACHE[:-1], i64, i64, i64[::1]))
def take_prefix(
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
    row: int,
    units: int,
    path: I64,
) -> None:
    """Give an opened, empty row the blocks of a prefix that was found."""
    total = info[info.shape[0] - 1, ROWS]
    width = NODE_FIELDS + meta[PARTS]
    line = row * LINE_FIELDS
    tokens, retired = units * meta[UNIT], meta[RETIRED]
    for group in range(info.shape[0] - 1):
        dense = info[group, DENSE]
        if dense == 0:
            continue
        here = (group * total + row) * STATE_FIELDS
        start = info[group, BASE] + row * info[group, WIDTH]
        gone, live = dead(info, group, tokens), units * dense
        column, block = gone, i64(0)
        for index in range(gone // dense, units):
            seat = path[index] * width + NODE_FIELDS + info[group, SEAT_BASE] - index * dense
            while column < (index + 1) * dense:
                block = nodes[seat + column] & LOW31
                at = block * BLOCK_FIELDS
                if blocks[at + REF] > 0 or blocks[at + PINS] or blocks[at + FENCE] > retired:
                    adopt(meta, blocks, block)
                else:  # as adopt does with an idle block, without a call
                    after, before = i64(blocks[at + NEXT]) & LOW31, i64(blocks[at + PREV]) & LOW31
                    blocks[before * BLOCK_FIELDS + NEXT] = after
                    blocks[after * BLOCK_FIELDS + PREV] = before
                    blocks[at + REF] = 1
                    meta[HELD] += 1
                    meta[CACHED] -= 1
                entries[start + column] = block
                column += 1
        touch(info, state, dirty, group, row, here, gone, live)
        state[here + COUNT] = live
        state[here + GONE] = gone
        state[here + TIP] = block
    go_on_from(meta, nodes, buckets, store, path[units - 1], lines[line + NODE])
    lines[line + NODE] = path[units - 1]
    lines[line + LENGTH] = tokens
    lines[line + FINAL] = tokens
    lines[line + DONE] = tokens


@helper(i64(i64[:, ::1], i32[::1], i64[::1], i64[::1], *[i64[::1]] * 2, sealed(i32[::1]), *[i64] * 2, *[i64[::1]] * 2))
def check_prompts(
    info: I64,
    state: I32,
    meta: I64,
    lines: I64,
    rows: I64,
    indptr: I64,
    words: I32,
    stride: int,
    mode: int,
    limits: I64,
    finals: I64,
) -> int:
    """Refuse what no state of the cache could admit; leave in meta[NEEDED] the blocks that all need without any hit."""
    n, per = indptr.size - 1, meta[WORDS]
    if n < 0 or indptr[0] != 0 or (mode != LOOKUP and rows.size != n):
        return refuse(info, BAD_INDPTR, 0, n, -1, indptr[0] if indptr.size else 0, rows.size, 0)
    if mode != LOOKUP:
        code = check_rows(info, state, rows, n)
        if code != OK:
            return code
    needed, end = i64(0), i64(0)
    for i in range(n):
        row = rows[i] if mode != LOOKUP else i
        begin, end = end, indptr[i + 1]
        count = end - begin
        if count < 0 or end * per * stride > words.size:
            return refuse(info, BAD_INDPTR, 0, i + 1, row, end, begin, 0)
        known = scan(words, begin, count, per, stride)
        if known < 0:
            return refuse(info, -known, 0, i, row, begin, end, 0)
        if mode == LOOKUP:
            continue
        if lines[row * LINE_FIELDS + ROOT]:
            return refuse(info, IN_USE, 0, i, row, 0, 0, 0)
        if mode == MATCH:
            continue
        if count > meta[LARGEST]:
            return refuse(info, NEVER, 0, i, row, count, meta[LARGEST], 0)
        if limits[i] < 0:
            return refuse(info, BAD_LIMIT, 0, i, row, limits[i], 0, 0)
        if finals.size:
            if finals[i] < 0 or finals[i] > count:
                return refuse(info, BAD_FINAL, 0, i, row, finals[i], count, 0)
            if finals[i] > known:
                return refuse(info, UNKNOWN_TOKEN, 0, i, row, known, finals[i], 0)
        for group in range(info.shape[0] - 1):
            needed += columns(info, group, count)
    if end * per * stride != words.size:
        return refuse(info, BAD_INDPTR, 0, n, -1, end, words.size, 0)
    meta[NEEDED] = needed
    return OK


@helper(i64(i64[::1]))
def noted_limit(limits: I64) -> Any:
    """Return the limit that a journal has of a call whose rows all have one, -1 for none."""
    if limits.size == 0 or limits[0] >= NO_LIMIT:
        return i64(-1)
    return limits[0]


@compiled(
    i64(
        *CACHE,
        *[i64[::1]] * 2,
        sealed(i32[::1]),
        *[i64] * 2,
        *[i64[::1]] * 3,
        *[i64] * 3,
        *[i64[::1]] * 2,
        i64[:, ::1],
        i64[::1],
    )
)
def admit(
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
    rows: I64,
    indptr: I64,
    words: I32,
    stride: int,
    mode: int,
    limits: I64,
    finals: I64,
    roots: I64,
    headroom: int,
    first: int,
    saved: int,
    path: I64,
    cached: I64,
    out: I64,
    journal: I64,
) -> int:
    """Look prompts up, or open rows on the prefixes found (MATCH), and compute up to limits[i] tokens behind (ADMIT).

    Row after row, from row ``first`` on; where a row does not fit, or slots for nodes are short, the rows before it are
    done, meta[SERVED] of them with meta[TOKENS] slots written, and the caller goes on or puts everything back. Unless all
    is ``saved``, a call that may come to that ends with SAVE before it changes anything. With a journal, which has no place for
    roots, finals and a limit of each, the call is noted, done or short of blocks.
    """
    per, unit = meta[WORDS], meta[UNIT]
    width = NODE_FIELDS + meta[PARTS]
    risky = False
    if first == 0:
        code = check_prompts(info, state, meta, lines, rows, indptr, words, stride, mode, limits, finals)
        if code != OK:
            return code
        if not has_room(journal, room_of_prompts(rows, indptr)):
            meta[NEEDED] = room_of_prompts(rows, indptr)
            return JOURNAL_FULL
        if mode == ADMIT and indptr.size > 2 and not saved:
            risky = meta[NEEDED] + headroom > meta[FREE] + meta[CACHED]
            for i in range(finals.size):
                risky |= finals[i] > min(indptr[i + 1] - indptr[i], limits[i])  # may be more than the row will hold
        meta[TOKENS] = 0
        meta[NEEDED] = 0
    for i in range(first, indptr.size - 1):
        hashed, compared = meta[HASHED], meta[COMPARED]
        at, count = indptr[i] * per * stride, indptr[i + 1] - indptr[i]
        root = i64(1)
        if roots.size and roots[i]:
            root = roots[i]
        units = i64(0)
        if root > 0 and meta[INDEXED]:
            units = walk(info, meta, nodes, buckets, store, root, words, at, stride, count, path)
        hit = units * unit
        cached[i] = hit
        if mode == LOOKUP:
            meta[HASHED], meta[COMPARED] = hashed, compared
            continue
        row = rows[i]
        target = hit
        if mode == ADMIT:
            target = hit + min(limits[i], count - hit)
            meta[SERVED] = i
            if finals.size and finals[i] > max(hit, target):
                meta[HASHED], meta[COMPARED] = hashed, compared
                return refuse(info, BAD_FINAL, 0, i, row, finals[i], target, 0)
            need = i64(0)
            for group in range(info.shape[0] - 1):
                need += columns(info, group, target) - columns(info, group, hit)
            idle = i64(0)
            if need + headroom > meta[FREE]:
                idle = idle_in(info, meta, blocks, nodes, units, path)
            if need + headroom > meta[FREE] + meta[CACHED] - idle:
                meta[AVAILABLE] = meta[NEEDED] + meta[FREE] + meta[CACHED] - idle
                meta[NEEDED] += need
                meta[HASHED], meta[COMPARED] = hashed, compared
                if journal.size:
                    note_prompts(
                        *(journal, KIND_ADMIT | REFUSED, rows, indptr, words, per * stride, OUT_OF_BLOCKS),
                        *(out, 0, noted_limit(limits), headroom),
                    )
                return SHORT_OF_BLOCKS
            short = meta[SLOTS] + (target - hit) // unit + 3 > nodes.size // width
            if short or risky:
                meta[HASHED], meta[COMPARED] = hashed, compared
                return GROW if short else SAVE
            meta[NEEDED] += need
        meta[QUERY_TOKENS] += count
        meta[HIT_TOKENS] += hit
        open_row(meta, nodes, lines, row, root)
        if units:
            take_prefix(info, state, entries, dirty, meta, blocks, nodes, buckets, store, lines, row, units, path)
        if mode == MATCH:
            continue
        known = hit + scan(words, indptr[i] + hit, target - hit, per, stride)
        final = known
        if finals.size:
            final = max(hit, finals[i])
        serve(
            info,
            state,
            entries,
            dirty,
            meta,
            blocks,
            nodes,
            buckets,
            store,
            lines,
            copies,
            row,
            target,
            final,
            words,
            at + hit * per * stride,
            stride,
            out,
            meta[TOKENS],
        )
        meta[TOKENS] += target - hit
    meta[SERVED] = indptr.size - 1
    if journal.size:
        kind = KIND_LOOKUP if mode == LOOKUP else KIND_ADMIT
        note_prompts(
            *(journal, kind, rows, indptr, words, per * stride, cached),
            *(out, meta[TOKENS], noted_limit(limits), headroom),
        )
    return OK

"""The verbs of a cache that confirm, shorten, end and fork rows: one compiled call each.

Each looks at everything before it changes anything; what it refuses it tells through the fault row of ``info`` and
``meta``, as the loops of the tables do.
"""

from blocktable._cache_layout import (
    BAD_FINAL,
    BAD_LENGTH,
    BAD_TOKENS,
    BLOCK_FIELDS,
    DENSE,
    FINAL,
    GROW,
    HEAD,
    HEIRS,
    I32,
    I64,
    IN_USE,
    INDEX,
    JOURNAL_FULL,
    LATEST,
    LENGTH,
    LINE_FIELDS,
    NEEDED,
    NODE,
    NODE_FIELDS,
    NOT_IN_USE,
    PARENT,
    PARENT_SERIAL,
    PARTS,
    PIN,
    REACH,
    REF,
    ROOT,
    SERIAL,
    SHARED,
    SLOTS,
    SPAN,
    TAIL,
    TAIL_AT,
    TIP,
    TOO_SHORT,
    UNIT,
    UNKNOWN_TOKEN,
    WORDS,
)
from blocktable._cache_layout import (
    BASE as DONE,
)
from blocktable._extend_kernels import CACHE, scan
from blocktable._jit import compiled, helper, i32, i64, nothing, sealed
from blocktable._journal import LINE, has_room, note_free
from blocktable._kernels import (
    BAD_INDPTR,
    BAD_ROW,
    BASE,
    COUNT,
    GONE,
    KIND,
    OK,
    ROWS,
    STATE,
    STATE_FIELDS,
    WIDTH,
    WINDOW,
    check_rows,
    refuse,
    touch,
)
from blocktable._pool_kernels import adopt
from blocktable._prefix_kernels import go_on_from, take_slot, unseat
from blocktable._row_kernels import (
    TABLES,
    advance,
    drop_drafts,
    first_unknown,
    give_back,
    put,
    settle_final,
)
from blocktable._runs import copy_range


@compiled(i64(*CACHE, i64[::1], i64[::1], i64[::1], sealed(i32[::1]), i64))
def confirm(
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
    lengths: I64,
    indptr: I64,
    words: I32,
    stride: int,
) -> int:
    """Raise the final marks of rows to lengths[i], with the tokens between the old mark and the new if given."""
    n, per = rows.size, meta[WORDS]
    code = check_rows(info, state, rows, n)
    if code != OK:
        return code
    if stride and (indptr.size != n + 1 or indptr[0] != 0 or indptr[n] * per * stride != words.size):
        return refuse(info, BAD_INDPTR, 0, n, -1, indptr[0] if indptr.size else 0, words.size, 0)
    for i in range(n):
        row, length = rows[i], lengths[i]
        line = row * LINE_FIELDS
        if lines[line + ROOT] == 0:
            return refuse(info, NOT_IN_USE, 0, i, row, 0, 0, 0)
        mark = lines[line + FINAL]
        if length < mark or length > lines[line + LENGTH]:
            return refuse(info, BAD_FINAL, 0, i, row, length, lines[line + LENGTH], mark)
        at = i64(0)
        if stride:
            if indptr[i + 1] - indptr[i] != length - mark:
                return refuse(info, BAD_TOKENS, 0, i, row, indptr[i + 1] - indptr[i], length - mark, mark)
            known = scan(words, indptr[i], length - mark, per, stride)
            if known < 0:
                return refuse(info, -known, 0, i, row, indptr[i], indptr[i + 1], 0)
            at = indptr[i] * per * stride
        first = first_unknown(meta, nodes, store, lines, row, mark, length, words, at, stride)
        if first < length:
            return refuse(info, UNKNOWN_TOKEN, 0, i, row, first, length, mark)
    for i in range(n):
        row, length = rows[i], lengths[i]
        mark = lines[row * LINE_FIELDS + FINAL]
        if stride:
            at, step = indptr[i] * per * stride, per * stride
            known = scan(words, indptr[i], length - mark, per, stride)
            put(meta, nodes, store, lines, row, mark, mark + known, words, at, stride)
            for position in range(mark + known, length):
                if words[at + (position - mark + 1) * step - stride] >= 0:
                    put(
                        meta,
                        nodes,
                        store,
                        lines,
                        row,
                        position,
                        position + 1,
                        words,
                        at + (position - mark) * step,
                        stride,
                    )
        settle_final(info, entries, meta, blocks, nodes, buckets, store, lines, row, length)
        advance(info, state, entries, dirty, meta, blocks, copies, row, length)
    return OK


@helper(i64(i64[:, ::1], i32[::1], i64[::1], i64))
def least_length(info: I64, state: I32, lines: I64, row: int) -> int:
    """Return the least length a row may be cut to: what its windows read behind it is still there, and its state."""
    total = info[info.shape[0] - 1, ROWS]
    least: int = i64(0)
    for group in range(info.shape[0] - 1):
        gone = i64(state[(group * total + row) * STATE_FIELDS + GONE])
        kind, reach = info[group, KIND], info[group, REACH]
        need = i64(0)
        if kind == STATE:
            need = lines[row * LINE_FIELDS + FINAL]
        elif gone and kind == WINDOW:
            need = gone * info[group, SPAN] + reach - 1
        elif gone:
            need = (gone * info[group, SPAN] + reach - 1) // reach * reach
        least = max(least, need)
    return least


@helper(nothing(i64[::1], *INDEX[2:], i64[::1], i64, i64))
def reopen(meta: I64, nodes: I64, buckets: I32, store: I32, lines: I64, row: int, length: int) -> None:
    """Let a row go on from ``length`` below BASE: the unit it falls in becomes a draft again."""
    unit, parts = meta[UNIT], meta[PARTS]
    width, words = NODE_FIELDS + parts, unit * meta[WORDS]
    line = row * LINE_FIELDS
    done, before = lines[line + DONE], lines[line + NODE]
    index = length // unit
    inside, node = before, before  # the node of the unit that ``length`` falls in, and the one before it
    if before:
        for _ in range(done // unit - index):
            inside = node
            if node == 0 or nodes[nodes[node * width + PARENT] * width + SERIAL] != nodes[node * width + PARENT_SERIAL]:
                node = 0
            else:
                node = nodes[node * width + PARENT]
    if length == 0 and before:
        node = lines[line + ROOT]
    draft = i64(0)
    if length > index * unit:
        draft = take_slot(meta, nodes)
        for i in range(words):
            store[draft * words + i] = store[inside * words + i]
    lines[line + HEAD] = draft
    lines[line + TAIL] = draft
    lines[line + TAIL_AT] = index * unit
    lines[line + DONE] = index * unit
    lines[line + NODE] = node
    go_on_from(meta, nodes, buckets, store, node, 0)
    go_on_from(meta, nodes, buckets, store, 0, before)


@helper(nothing(*TABLES[:3], *INDEX, i64, i64))
def forget_cut(
    info: I64,
    state: I32,
    entries: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    buckets: I32,
    store: I32,
    row: int,
    length: int,
) -> None:
    """Let the blocks of a unit that a row was cut in back no node, unless another row holds them: it may have it whole."""
    unit, total = meta[UNIT], info[info.shape[0] - 1, ROWS]
    if length % unit == 0:
        return
    index = length // unit
    for group in range(info.shape[0] - 1):
        live = i64(state[(group * total + row) * STATE_FIELDS + COUNT])
        start = info[group, BASE] + row * info[group, WIDTH]
        dense = info[group, DENSE]
        for column in range(index * dense, min(live, (index + 1) * dense)):
            block = i64(entries[start + column])
            if block and blocks[block * BLOCK_FIELDS + REF] == 1:
                unseat(meta, blocks, nodes, buckets, store, block)


@compiled(i64(*CACHE, i64[::1], i64[::1], i64, i64, i64[::1]))
def shorten(
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
    lengths: I64,
    fence: int,
    close: int,
    journal: I64,
) -> int:
    """Cut rows to lengths[i] tokens, or with ``close`` take them out of use; their blocks wait for ``fence``.

    With a journal, which has a place for rows taken out of use without a fence, the call is noted.
    """
    n = rows.size
    width = NODE_FIELDS + meta[PARTS]
    code = check_rows(info, state, rows, n)
    if code != OK:
        return code
    for i in range(n):
        row = rows[i]
        line = row * LINE_FIELDS
        if lines[line + ROOT] == 0:
            return refuse(info, NOT_IN_USE, 0, i, row, 0, 0, 0)
        if close:
            continue
        if lengths[i] < 0 or lengths[i] > lines[line + LENGTH]:
            return refuse(info, BAD_LENGTH, 0, i, row, lengths[i], lines[line + LENGTH], 0)
        least = least_length(info, state, lines, row)
        if lengths[i] < least:
            return refuse(info, TOO_SHORT, 0, i, row, lengths[i], least, 0)
    if not close and meta[SLOTS] + n + 1 > nodes.size // width:
        meta[NEEDED] = n + 1
        return GROW
    if not has_room(journal, LINE + n):
        meta[NEEDED] = LINE + n
        return JOURNAL_FULL
    for i in range(n):
        row = rows[i]
        line = row * LINE_FIELDS
        length = i64(0)
        if not close:
            length = lengths[i]
        give_back(info, state, entries, dirty, meta, blocks, copies, row, length, fence)
        drop_drafts(meta, nodes, lines, row, max(length, lines[line + DONE]))
        if close:
            go_on_from(meta, nodes, buckets, store, 0, lines[line + NODE])
            go_on_from(meta, nodes, buckets, store, 0, lines[line + ROOT])
            for field in range(LINE_FIELDS):
                lines[line + field] = 0
            continue
        if length == lines[line + LENGTH]:
            continue
        lines[line + SHARED] = 1
        lines[line + LENGTH] = length
        lines[line + FINAL] = min(length, lines[line + FINAL])
        if length < lines[line + DONE]:
            reopen(meta, nodes, buckets, store, lines, row, length)
        forget_cut(info, state, entries, meta, blocks, nodes, buckets, store, row, length)
    if journal.size:
        note_free(journal, rows)
    return OK


@compiled(i64(*TABLES, *INDEX[:3], i32[::1], i64[::1], i64, i64))
def fork(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    meta: I64,
    blocks: I32,
    nodes: I64,
    store: I32,
    lines: I64,
    row: int,
    into: int,
) -> int:
    """Let an unused row hold what another holds: the same blocks, and drafts of its own with the same tokens."""
    total, unit = info[info.shape[0] - 1, ROWS], meta[UNIT]
    width, words = NODE_FIELDS + meta[PARTS], unit * meta[WORDS]
    if row < 0 or row >= total or into < 0 or into >= total:
        name = into if 0 <= row < total else row
        return refuse(info, BAD_ROW, 0, 0, name, name, total, 0)
    source, target = row * LINE_FIELDS, into * LINE_FIELDS
    if lines[source + ROOT] == 0:
        return refuse(info, NOT_IN_USE, 0, 0, row, 0, 0, 0)
    if lines[target + ROOT]:
        return refuse(info, IN_USE, 0, 0, into, 0, 0, 0)
    drafts = (lines[source + LENGTH] - lines[source + DONE] + unit - 1) // unit
    if meta[SLOTS] + drafts + 1 > nodes.size // width:
        meta[NEEDED] = drafts + 1
        return GROW
    lines[source + SHARED] = 1
    for field in range(LINE_FIELDS):
        lines[target + field] = lines[source + field]
    nodes[lines[source + ROOT] * width + HEIRS] += PIN
    if lines[source + NODE]:
        nodes[lines[source + NODE] * width + HEIRS] += PIN
    draft, before = lines[source + HEAD], i64(0)
    while draft:
        slot = take_slot(meta, nodes)
        for i in range(words):
            store[slot * words + i] = store[draft * words + i]
        if before:
            nodes[before * width + LATEST] = slot
        else:
            lines[target + HEAD] = slot
        lines[target + TAIL] = slot
        before = slot
        draft = nodes[draft * width + LATEST]
    for group in range(info.shape[0] - 1):
        here, there = (group * total + row) * STATE_FIELDS, (group * total + into) * STATE_FIELDS
        live = i64(state[here + COUNT])
        start = info[group, BASE] + row * info[group, WIDTH]
        for column in range(live):
            block = i64(entries[start + column])
            if block:
                adopt(meta, blocks, block)
        copy_range(entries, info[group, BASE] + into * info[group, WIDTH], entries, start, start + live)
        touch(info, state, dirty, group, into, there, 0, live)
        state[there + COUNT] = live
        state[there + GONE] = state[here + GONE]
        state[there + TIP] = state[here + TIP]
    return OK

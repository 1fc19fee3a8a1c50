"""Lengthening rows: the one call of most engine steps.

It looks at everything before it changes anything; what it refuses it tells through the fault row of ``info`` and
``meta``, as the loops of the tables do.
"""

import numpy as np

from blocktable._cache_layout import (
    AVAILABLE,
    BAD_FINAL,
    BAD_TOKEN,
    BLOCK_FIELDS,
    BLOCKS,
    CACHED,
    COPIES,
    FINAL,
    FREE,
    GROW,
    HEAVY,
    HEIRS,
    I32,
    I64,
    INDEX,
    INDEXED,
    JOURNAL_FULL,
    LARGEST,
    LENGTH,
    LIGHT,
    LINE_FIELDS,
    LISTS,
    LOW31,
    LOW62,
    NEEDED,
    NEVER,
    NODE,
    NODE_FIELDS,
    OTHER_SALT,
    PARTS,
    PIN,
    PINS,
    PLAN,
    REF,
    ROOT,
    SERVED,
    SHARED,
    SHORT_OF_BLOCKS,
    SLOTS,
    SPAN,
    TAIL,
    TAIL_AT,
    TAKEN,
    TARGET,
    TIP,
    UNIT,
    UNKNOWN_TOKEN,
    WIDEN,
    WORDS,
    WORK,
)
from blocktable._cache_layout import (
    BASE as DONE,
)
from blocktable._jit import compiled, helper, i32, i64, nothing, sealed, u64
from blocktable._journal import LINE, has_room, note_extend
from blocktable._kernels import (
    BAD_INDPTR,
    BASE,
    BLOCK,
    COUNT,
    CP,
    FULL,
    GONE,
    KIND,
    OK,
    ROWS,
    STATE,
    STATE_FIELDS,
    WIDTH,
    check_rows,
    refuse,
)
from blocktable._pool_kernels import at_rest, source_of
from blocktable._row_kernels import (
    TABLES,
    columns,
    dead,
    first_unknown,
    put,
    serve,
    settle_final,
    supply,
    write_slots,
)

UNKNOWN = np.full(2, -1, np.int32)  # the words of a token that is not known yet

CACHE = (*TABLES, *INDEX, i64[::1], i32[::1])  # info .. dirty, meta .. store, lines, copies


@helper(i64(sealed(i32[::1]), i64, i64, i64, i64))
def scan(words: I32, begin: int, count: int, per: int, stride: int) -> int:
    """Return the first unknown of the tokens begin .. begin + count - 1 (count if none), or minus what is wrong.

    With two words of input and one in the store, a token that needs both asks for a wider store.
    """
    if stride == 0:
        return 0
    at = begin * per * stride
    start, step = u64(at), u64(per)
    lowest = i32(0)
    if stride == 2:
        wide = i32(0)
        for i in range(u64(count)):
            word = words[start + i + i]
            wide |= (word >> 31) ^ words[start + i + i + u64(1)]
            lowest = min(lowest, word)
        if wide:
            return -WIDEN
    elif per == 1:
        for i in range(u64(count)):
            lowest = min(lowest, words[start + i])
    else:
        start += u64(per - 1)
        at += per - 1
        for i in range(u64(count)):
            lowest = min(lowest, words[start + i * step])
    if lowest == 0:
        return count
    first = count
    every = per * stride
    for i in range(count):
        word = words[at + i * every]
        if word < 0:
            if word != -1 or (per == 2 and words[at + i * every - 1] != -1):
                return -BAD_TOKEN
            if first == count:
                first = i
    return first


@helper(i64(*TABLES[:3], *LISTS, i64[::1], i32[::1], i64, i64, i64))
def pretend(
    info: I64,
    state: I32,
    entries: I32,
    meta: I64,
    blocks: I32,
    lines: I64,
    copies: I32,
    row: int,
    count: int,
    step: int,
) -> int:
    """Take from owners' counts what lengthening a row by ``count`` will take (step -1), or put that back (step 1).

    Returns the blocks it comes to: those that windows give back to the pool, less those that shared blocks need.
    """
    total = info[info.shape[0] - 1, ROWS]
    line = row * LINE_FIELDS
    gain: int = i64(0)
    if step < 0:
        lines[line + TAKEN] = 0
    for group in range(info.shape[0] - 1):
        here = (group * total + row) * STATE_FIELDS
        live = i64(state[here + COUNT])
        start = info[group, BASE] + row * info[group, WIDTH]
        kind = info[group, KIND]
        first = i64(0)
        if kind != STATE:
            first = lines[line + LENGTH] // info[group, SPAN]
            if kind != FULL:
                for column in range(i64(state[here + GONE]), dead(info, group, lines[line + FINAL])):
                    block = i64(entries[start + column])
                    blocks[block * BLOCK_FIELDS + REF] += step
                    owners = blocks[block * BLOCK_FIELDS + REF]
                    if owners == 0:
                        gain += at_rest(meta, blocks, block)
                    if owners == (1 + step) // 2 and blocks[block * BLOCK_FIELDS + PINS] >= TARGET:
                        # a copy to it is called off, and its source may be at rest in turn
                        source = source_of(copies, block)
                        blocks[source * BLOCK_FIELDS + PINS] += step
                        gain += at_rest(meta, blocks, source)
        if lines[line + SHARED] == 0 or count == 0:
            continue
        bit = i64(1) << group
        for column in range(first, live):
            at = i64(entries[start + column]) * BLOCK_FIELDS
            if step < 0:
                if blocks[at + REF] > 1:
                    lines[line + TAKEN] |= bit
                    blocks[at + REF] -= 1
                    gain -= 1
            elif lines[line + TAKEN] & bit:
                blocks[at + REF] += 1
    return gain


@helper(nothing(i64[::1], i64[::1], i64[::1], i64, i64))
def open_row(meta: I64, nodes: I64, lines: I64, row: int, root: int) -> None:
    """Take a row into use, empty, under a salt's root."""
    line = row * LINE_FIELDS
    for field in range(LINE_FIELDS):
        lines[line + field] = 0
    at = root * (NODE_FIELDS + meta[PARTS])
    lines[line + ROOT] = root
    nodes[at + HEIRS] += PIN
    if meta[INDEXED]:
        lines[line + NODE] = root
        nodes[at + HEIRS] += PIN


@compiled(i64(*CACHE, i64[::1], i64[::1], sealed(i32[::1]), i64, i64[::1], i64[::1], i64, i64, i64[:, ::1], i64[::1]))
def extend(
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
    finals: I64,
    roots: I64,
    headroom: int,
    partial: int,
    out: I64,
    journal: I64,
) -> int:
    """Lengthen rows by indptr[i + 1] - indptr[i] tokens each, or with ``partial`` as many of the first rows as fit.

    The first loop decides, and finds the rows for which nothing but tokens and slots is to be written: most rows of
    most steps. meta[SERVED] counts the rows served. With a journal, which has no place for finals, roots, ``partial`` and
    headroom, the call is noted.
    """
    n, groups = rows.size, info.shape[0] - 1
    total, unit, per = info[groups, ROWS], meta[UNIT], meta[WORDS]
    width = NODE_FIELDS + meta[PARTS]
    if indptr.size != n + 1 or indptr[0] != 0:
        return refuse(info, BAD_INDPTR, 0, 0, -1, indptr[0] if indptr.size else 0, 0, 0)
    code = check_rows(info, state, rows, n)
    if code != OK:
        return code
    available = meta[FREE] + meta[CACHED]
    needed = gained = shared = pretended = end = i64(0)
    served, short_needed, short_gained = i64(-1), i64(0), i64(0)
    code = i64(OK)
    for i in range(n):
        row = rows[i] & LOW31
        line = row * LINE_FIELDS
        begin, end = end, indptr[i + 1]
        count = end - begin
        if count < 0 or (stride and end * per * stride > words.size):
            code = refuse(info, BAD_INDPTR, 0, i + 1, row, end, begin, 0)
            break
        length, root = lines[line + LENGTH], lines[line + ROOT]
        to = length + count
        if to > meta[LARGEST]:
            code = refuse(info, NEVER, 0, i, row, to, meta[LARGEST], 0)
            break
        if roots.size and root and roots[i] and roots[i] != root:
            code = refuse(info, OTHER_SALT, 0, i, row, 0, 0, 0)
            break
        known = count
        if (
            count != 1 or stride * per != 1 or words[begin & LOW62] < 0
        ):  # else one token, known: most rows of most steps
            known = scan(words, begin, count, per, stride)
            if known < 0:
                code = refuse(info, -known, 0, i, row, begin, end, 0)
                break
        mark = lines[line + FINAL]
        final = length + known
        if mark < length:
            first = first_unknown(meta, nodes, store, lines, row, mark, length, UNKNOWN, 0, 0)
            if first < length:
                final = first
        if finals.size:
            wish = finals[i]
            if wish < 0 or wish > to:
                code = refuse(info, BAD_FINAL, 0, i, row, wish, to, 0)
                break
            if wish > final:
                code = refuse(info, UNKNOWN_TOKEN, 0, i, row, final, wish, 0)
                break
            final = max(wish, mark)
        work = i64(LIGHT)
        if lines[line + TAIL] == 0 or to - lines[line + TAIL_AT] > unit or final >= lines[line + DONE] + unit:
            work = i64(BLOCKS)
        if root == 0 or lines[line + SHARED]:
            work = i64(HEAVY)
        need = i64(0)
        for group in range(groups):
            here = ((group * total + row) & LOW31) * STATE_FIELDS
            live = i64(state[here + COUNT])
            if info[group, KIND] == STATE:
                if live == 0:
                    need += columns(info, group, to)
            else:
                if to > live * info[group, SPAN]:
                    need += columns(info, group, to) - live
                if info[group, KIND] != FULL and dead(info, group, mark) > state[here + GONE]:
                    work = i64(HEAVY)
        if need and work == LIGHT:
            work = i64(BLOCKS)
        lines[line + WORK] = work
        if work == HEAVY:
            gain = pretend(info, state, entries, meta, blocks, lines, copies, row, count, -1)
            taken = lines[line + TAKEN]
            pretended = i + 1
            gained += gain
            if taken:  # blocks to copy: counted as needed, so that gains are what windows give back
                for group in range(groups):
                    if taken >> group & 1:
                        many = columns(info, group, 1)
                        need += many
                        shared += many
                        gained += many
        needed += need
        lines[line + PLAN] = final
        if served < 0 and needed + headroom > available + gained:
            served, short_needed, short_gained = i, needed, gained
            if partial:
                break
    for i in range(max(served, 0), n if code == OK and partial else 0):  # rows that are not looked at otherwise
        if indptr[i + 1] < indptr[i]:
            code = refuse(info, BAD_INDPTR, 0, i + 1, -1, indptr[i + 1], indptr[i], 0)
    if code == OK and stride and indptr[n] * per * stride != words.size:
        code = refuse(info, BAD_INDPTR, 0, n, -1, indptr[n], words.size // (per * stride), 0)
    for back in range(pretended):
        row = rows[pretended - 1 - back]
        if lines[row * LINE_FIELDS + WORK] == HEAVY:
            pretend(info, state, entries, meta, blocks, lines, copies, row, 1, 1)
    if code != OK:
        return code
    if served >= 0 and not partial:
        if needed + headroom <= available + gained:
            needed, gained = short_needed, short_gained
        meta[NEEDED], meta[AVAILABLE], meta[SERVED] = needed, available + gained, served
        return SHORT_OF_BLOCKS
    if served < 0:
        served = n
    if meta[SLOTS] + indptr[served] // unit + n + 1 > nodes.size // width or 3 * (meta[COPIES] + shared) > copies.size:
        meta[NEEDED] = indptr[served] // unit + n + 1
        return GROW
    if not has_room(journal, LINE + 2 * n + 1 + indptr[n]):
        meta[NEEDED] = LINE + 2 * n + 1 + indptr[n]
        return JOURNAL_FULL
    meta[SERVED] = served
    for i in range(served):
        row = rows[i] & LOW31
        line = row * LINE_FIELDS
        begin = indptr[i]
        count = indptr[i + 1] - begin
        length, final, work = lines[line + LENGTH], lines[line + PLAN], lines[line + WORK]
        to = length + count
        if work == HEAVY:
            if lines[line + ROOT] == 0:
                open_row(meta, nodes, lines, row, max(roots[i], 1) if roots.size else 1)
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
                to,
                final,
                words,
                begin * per * stride,
                stride,
                out,
                begin,
            )
            continue
        if work == BLOCKS:
            supply(info, state, entries, dirty, meta, blocks, nodes, buckets, store, row, to)
        tail, low = lines[line + TAIL] & LOW31, lines[line + TAIL_AT]
        if tail and to - low <= unit:
            target, source = ((tail * unit + length - low) * per) & LOW62, (begin * per * stride) & LOW62
            for k in range(count * per):
                store[target + k] = words[source + k * stride]
        else:
            put(meta, nodes, store, lines, row, length, to, words, begin * per * stride, stride)
        for group in range(groups):
            here = ((group * total + row) & LOW31) * STATE_FIELDS
            last = i64(state[here + COUNT]) - 1
            offset = length - last * info[group, SPAN]
            if info[group, KIND] == STATE or info[group, CP] != 1 or offset < 0:
                write_slots(info, entries, meta, group, row, length, to, out, begin)
            else:
                at = i64(state[here + TIP]) * info[group, BLOCK] + offset
                for token in range(count):
                    out[group, begin + token] = at + token
        lines[line + LENGTH] = to
        if final >= lines[line + DONE] + unit:
            settle_final(info, entries, meta, blocks, nodes, buckets, store, lines, row, final)
        else:
            lines[line + FINAL] = final
    if journal.size:
        note_extend(journal, rows, indptr, words, per * stride, out)
    return OK

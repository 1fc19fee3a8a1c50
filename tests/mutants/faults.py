"""The planted faults: one-line sabotages of the library, each with the laws that a sanitizer may name for it.

``Fault(kind, area, file, old, new, laws)``: in src/blocktable/FILE the text OLD, which must be there exactly once, becomes
NEW. ``area`` says which workloads and which state machine must notice.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One sabotage."""

    kind: str
    area: str
    file: str
    old: str
    new: str
    laws: str

    @property
    def name(self) -> str:
        """Say it in one line."""
        return f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


T, C, P, D = "tables", "cache", "plan", "device"
KERNELS, ROWS, POOL, EXTEND = "_kernels.py", "_row_kernels.py", "_pool_kernels.py", "_extend_kernels.py"
ADMIT, PREFIX, APPLY, REFERENCE = "_admit_kernels.py", "_prefix_kernels.py", "_apply.py", "device/reference.py"

FAULTS = [
    # K1 width-disagreement
    Fault("K1", P, "_ints.py", "return -(-a // b)\n", "return a // b\n", "L1"),
    Fault("K1", P, "_ints.py", "return -(-a // multiple) * multiple", "return a // multiple * multiple", "L1"),
    Fault("K1", P, "_ints.py", "return -(-a // multiple) * multiple", "return (a // multiple + 1) * multiple", "L1"),
    Fault("K1", P, "geometry.py", "        width = columns // ratio\n", "        width = columns\n", "L1"),
    Fault("K1", P, "geometry.py", "columns = align_up(low, multiple)", "columns = align_up(low + 1, multiple)", "L1"),
    Fault(
        "K1",
        P,
        "contracts/rules.py",
        "Widths(self.tokens // gcd(self.tokens, block_size), 0, None)",
        "Widths(max(self.tokens // block_size, 1), 0, None)",
        "L1",
    ),
    Fault(
        "K1",
        T,
        "state.py",
        "info[g, k.WIDTH], info[g, k.BASE], info[g, k.KERNEL_WIDTH] = shape.width, total",
        "info[g, k.WIDTH], info[g, k.BASE], info[g, k.KERNEL_WIDTH] = max(shape.width - 1, 1), total",
        "L1 L2 L3 L4 L5 L11",
    ),
    # K2 row-overflow
    Fault(
        "K2",
        P,
        "geometry.py",
        "needed = ceil_div(limit + ahead, block * ranks) + extra",
        "needed = ceil_div(limit, block * ranks) + extra",
        "L1",
    ),
    Fault(
        "K2",
        P,
        "geometry.py",
        "needed = ceil_div(limit + ahead, block * ranks) + extra",
        "needed = ceil_div(limit + ahead, block * ranks)",
        "L1",
    ),
    Fault("K2", T, KERNELS, "if column + (end - begin) > width:", "if column + (end - begin) > width + 1:", "L2"),
    Fault("K2", T, KERNELS, "if column + (end - begin) > width:", "if column + (end - begin) >= width:", "L2"),
    Fault("K2", T, KERNELS, "if counts[i] < 0 or counts[i] > live:", "if counts[i] < 0:", "L2 L4 L5"),
    Fault(
        "K2",
        T,
        KERNELS,
        "if state[row * STATE_FIELDS + SEEN] == mark:",
        "if state[row * STATE_FIELDS + SEEN] == mark + 1:",
        "L8",
    ),
    Fault(
        "K2",
        C,
        "_cache_plan.py",
        "_longest(lambda n: plan.needs(n) <= usable, widest)",
        "_longest(lambda n: plan.needs(n) <= usable + 1, widest)",
        "L2 L9",
    ),
    # K3 read-past-row
    Fault("K3", T, KERNELS, "if block <= 0 or block >= limit:", "if block <= 0 or block > limit:", "L3"),
    Fault(
        "K3",
        T,
        KERNELS,
        "if kind != STATE and (kind == FULL or kind == RING or column != gone):",
        "if kind == RING:",
        "L3",
    ),
    Fault("K3", T, KERNELS, "if row < 0 or row >= total:", "if row < -1 or row >= total:", "L2"),
    Fault("K3", T, KERNELS, "if position >= 0 and at < live and", "if position >= 0 and at <= live and", "L7 L13"),
    # K4 stale-tail
    Fault(
        "K4",
        T,
        KERNELS,
        "fill_null(entries, start + count, start + live)",
        "fill_null(entries, start + count + 1, start + live)",
        "L4 L5",
    ),
    Fault(
        "K4",
        T,
        KERNELS,
        "fill_null(entries, start + count, start + live)",
        "fill_null(entries, start + count, start + live - 1)",
        "L4 L5",
    ),
    Fault("K4", T, "state.py", "np.where(live, blocks * ratio + part, 0)", "blocks * ratio + part", "L4"),
    Fault("K4", D, REFERENCE, "table[z * CHUNK : z * CHUNK + mark] = 0", "table[z * CHUNK : z * CHUNK] = 0", "L4 L6"),
    Fault("K4", T, APPLY, "fill_null(entries, at, at + count)", "fill_null(entries, at, at + count - 1)", "L3 L4 L5"),
    # K5 stale-row
    Fault(
        "K5",
        T,
        KERNELS,
        "cut(info, state, entries, dirty, group, rows[i], line, 0)",
        "cut(info, state, entries, dirty, group, rows[i], line, 1 if state[line + COUNT] else 0)",
        "L2 L3 L4 L5",
    ),
    Fault(
        "K5",
        T,
        KERNELS,
        "fill_null(entries, start + gone, start + count)",
        "fill_null(entries, start + gone + 1, start + count)",
        "L3",
    ),
    Fault(
        "K5",
        T,
        KERNELS,
        "touch(info, state, dirty, group, rows[i], line, gone, count)",
        "touch(info, state, dirty, group, rows[i], line, gone, gone)",
        "L11",
    ),
    Fault(
        "K5",
        T,
        KERNELS,
        "touch(info, state, dirty, group, row, line, count, live)",
        "touch(info, state, dirty, group, row, line, live, live)",
        "L11",
    ),
    Fault("K5", T, KERNELS, "if state[line + HIGH] < high:", "if state[line + HIGH] > high:", "L11"),
    Fault("K5", T, KERNELS, "if state[line + LOW] > low:", "if state[line + LOW] < low:", "L11"),
    Fault("K5", T, KERNELS, "was = i64(0)", "was = i64(entries[at])", "L11"),
    Fault("K5", T, KERNELS, "spans[n, 5] = live", "spans[n, 5] = state[line + SENT]", "L11"),
    Fault(
        "K5",
        T,
        APPLY,
        "copy_range(entries, at, values, offset, offset + count)",
        "copy_range(entries, at, values, offset, offset + count - 1)",
        "L3",
    ),
    Fault(
        "K5", T, "tables.py", "emptied = [row for row in read if row not in set(written)]", "emptied = []", "L3 L5 L2"
    ),
    Fault(
        "K5",
        T,
        "snapshot.py",
        "table[row, : counts[g, row]]",
        "table[row, counts[g, row] - 1 :: -1][: counts[g, row]]",
        "L11",
    ),
    Fault("K5", C, ROWS, "tokens = mark - reach + 1\n", "tokens = mark - reach + 2\n", "L3 L9"),
    Fault("K5", C, ROWS, "tokens = mark // reach * reach", "tokens = mark", "L3 L9"),
    Fault(
        "K5",
        C,
        ROWS,
        "touch(info, state, dirty, group, row, line, gone, end)",
        "touch(info, state, dirty, group, row, line, gone, gone)",
        "L11",
    ),
    Fault(
        "K5", D, REFERENCE, "STATE_FIELDS + k.COUNT] = live", "STATE_FIELDS + k.COUNT] = max(live - 1, 0)", "L2 L4 L11"
    ),
    # K6 padding-sentinel
    Fault(
        "K6",
        T,
        KERNELS,
        "        while t < stop:\n            out[t] = -1\n",
        "        while t < stop:\n            out[t] = 0\n",
        "L6",
    ),
    Fault(
        "K6",
        T,
        KERNELS,
        "if not block_id:\n                    out[line + t] = -1",
        "if not block_id:\n                    out[line + t] = 0",
        "L6 L7 L13",
    ),
    Fault(
        "K6",
        D,
        REFERENCE,
        "batch.rows[i], batch.seq_lens[i] = row, length",
        "batch.rows[i], batch.seq_lens[i] = max(row, 0), length",
        "L6",
    ),
    Fault("K6", D, REFERENCE, "out[group] = -1", "out[group] = 0", "L6"),
    # K7 kernel-split-units
    Fault("K7", T, "state.py", "np.where(live, blocks * ratio + part, 0)", "np.where(live, blocks * ratio, 0)", "L12"),
    Fault(
        "K7",
        D,
        REFERENCE,
        "blocks[:, None] * ratio + np.arange(ratio, dtype=np.int32)",
        "blocks[:, None] + 0 * np.arange(ratio, dtype=np.int32)",
        "L12",
    ),
    Fault("K7", D, REFERENCE, "pages = min(-(-local // page), len(ids))", "pages = min(local // page, len(ids))", "L7"),
    # K8 block-size-selection
    Fault(
        "K8",
        P,
        "contracts/contract.py",
        "sorted({manager_block, *listed}, reverse=True)",
        "sorted({manager_block, *listed})",
        "L1 L12",
    ),
    Fault(
        "K8",
        P,
        "contracts/contract.py",
        "if manager_block % size == 0 and all(",
        "if manager_block % size <= 1 and all(",
        "L1 L12",
    ),
    Fault(
        "K8",
        P,
        "contracts/contract.py",
        "all(contract.accepts_block(size) for contract in every)",
        "all(contract.accepts_block(size) for contract in every[:1])",
        "L1 L12",
    ),
    # K9 cp-sharding
    Fault(
        "K9",
        P,
        "geometry.py",
        "needed = ceil_div(limit + ahead, block * ranks) + extra",
        "needed = ceil_div(limit + ahead, block) + extra",
        "L1",
    ),
    Fault("K9", T, KERNELS, "piece - own * ranks == mine", "piece - own * ranks >= mine", "L7 L13"),
    Fault("K9", C, ROWS, "if turn % ranks != rank:", "if turn % ranks == rank:", "L13"),
    Fault(
        "K9",
        C,
        ROWS,
        "return first + turn // ranks * chunk + offset % chunk",
        "return first + turn * chunk + offset % chunk",
        "L7",
    ),
    Fault(
        "K9", D, REFERENCE, "mine = (offset // chunk % ranks == rank)", "mine = (offset // chunk % ranks == 0)", "L13"
    ),
    # K10 length-row-coherence
    Fault("K10", C, ROWS, "return (tokens + span - 1) // span", "return tokens // span + 1", "L2 L9"),
    Fault(
        "K10",
        D,
        REFERENCE,
        "min(local - (pages - 1) * page, page) if pages else 1",
        "local % page if pages else 1",
        "L7",
    ),
    Fault(
        "K10", C, EXTEND, "out[group, begin + token] = at + token", "out[group, begin + token] = at + token + 1", "L7"
    ),
    # K11 double-free
    Fault(
        "K11",
        C,
        POOL,
        "    blocks[at + REF] -= 1\n    if blocks[at + REF]:",
        "    blocks[at + REF] -= 2\n    if blocks[at + REF]:",
        "L8 L9",
    ),
    Fault(
        "K11",
        C,
        ROWS,
        "if blocks[block * BLOCK_FIELDS + REF] == 1:",
        "if blocks[block * BLOCK_FIELDS + REF] >= 1:",
        "L8",
    ),
    Fault(
        "K11",
        C,
        "_cache_kernels.py",
        "            if block:\n                adopt(meta, blocks, block)\n",
        "            if block == 1:\n                adopt(meta, blocks, block)\n",
        "L8 L9",
    ),
    Fault(
        "K11", C, POOL, "if blocks[at + PINS] == 0 and blocks[at + FENCE] <= fence:", "if blocks[at + PINS] == 0:", "L9"
    ),
    Fault(
        "K11",
        C,
        POOL,
        "blocks[at + FENCE] = max(fence, i64(blocks[at + FENCE]))",
        "blocks[at + FENCE] = i64(blocks[at + FENCE])",
        "L9",
    ),
    Fault(
        "K11", C, ROWS, "blocks[block * BLOCK_FIELDS + PINS] += 1\n", "blocks[block * BLOCK_FIELDS + PINS] += 0\n", "L9"
    ),
    # K12 pool-leak
    Fault("K12", C, ROWS, "release(meta, blocks, copies, i64(entries[start + column]), 0)", "pass", "L9"),
    Fault(
        "K12", C, ROWS, "for column in range(live - 1, want - 1, -1):", "for column in range(live - 1, want, -1):", "L9"
    ),
    Fault(
        "K12",
        C,
        POOL,
        "        meta[FREE_TOP] = block\n        meta[FREE] += 1\n        return after",
        "        meta[FREE_TOP] = block\n        return after",
        "L9",
    ),
    # K13 capacity-accounting
    Fault(
        "K13",
        C,
        EXTEND,
        "if served < 0 and needed + headroom > available + gained:",
        "if served < 0 and needed + headroom >= available + gained:",
        "L9",
    ),
    Fault(
        "K13",
        C,
        EXTEND,
        "if served < 0 and needed + headroom > available + gained:",
        "if served < 0 and needed > available + gained:",
        "L9",
    ),
    Fault("K13", C, EXTEND, "    available = meta[FREE] + meta[CACHED]\n", "    available = meta[FREE]\n", "L9"),
    # K14 prefix-identity
    Fault("K14", C, PREFIX, "    return differ == 0\n", "    return differ != 1\n", "L10"),
    Fault("K14", C, "cache.py", "root = self._roots[salt] = self._new_root()", "root = self._roots[salt] = 1", "L10"),
    Fault("K14", C, EXTEND, "lines[line + PLAN] = final\n", "lines[line + PLAN] = to\n", "L10"),
    Fault(
        "K14", C, ADMIT, "most = min((count - 1) // meta[UNIT], spare)", "most = min(count // meta[UNIT], spare)", "L10"
    ),
    Fault(
        "K14",
        C,
        ADMIT,
        "dead(info, group, index * meta[UNIT]) < path[spare + group]:",
        "dead(info, group, index * meta[UNIT]) < 0:",
        "L3 L9 L10",
    ),
    Fault("K14", C, ROWS, "copies[pending + 1] = block\n", "copies[pending + 1] = fresh\n", "L8 L9"),
    # K15 integer-width
    Fault(
        "K15",
        T,
        "delta.py",
        "array.astype(_I32, copy=False).tobytes()",
        "(array & 0xFFFFFF).astype(_I32).tobytes()",
        "L11",
    ),
    Fault(
        "K15",
        T,
        KERNELS,
        "shift = (block_id - i64(column)) * block",
        "shift = (block_id - i64(column)) % 4096 * block",
        "L7",
    ),
    Fault("K15", D, REFERENCE, "slot = block_id * block +", "slot = (block_id * block).astype(np.int16) +", "L6 L7"),
    Fault(
        "K15",
        C,
        ROWS,
        "first = i64(entries[start + column]) * block",
        "first = i64(entries[start + column] % 4) * block",
        "L7 L6",
    ),
]

"""The state of a KVCache beside its tables: flat arrays, and the names of their fields.

    meta     int64 [META_FIELDS]          counts, list heads, constants and counters of the whole cache
    lines    int64 [rows x LINE_FIELDS]   one row's numbers: field F of row r is lines[r * LINE_FIELDS + F]
    blocks   int32 [(num_blocks + 1) x BLOCK_FIELDS]   owners of a block, the list it is in, the node it backs
    nodes    int64 [slots x (NODE_FIELDS + parts)]     the prefix index, and the tokens of rows that are no node yet
    buckets  int32 [power of two]         first node of each hash bucket
    store    int32 [slots x unit x words] the tokens of each node slot, one or two words per token
    copies   int32 [room x 3]             copy-on-write since the last commit: group, source, target

A *unit* is the least number of tokens that all groups cut into whole blocks; a node stands for one unit behind its
parent. Group g cuts a unit into DENSE blocks, so a node has one seat for each of them (a *part*), and a block backs a
node by sitting in one: SEAT = node x parts + part. Blocks that sit in one seat form a ring, the oldest first.

A row's tokens that are in no node yet lie in a chain of *drafts*: node slots without a serial, HEAD to TAIL, linked by
LATEST (the next) from the unit that begins at position BASE on.

A block with no owner is in one of three places: on the stack of free blocks (nothing is known of its content), in the
idle list (it backs a node, the longest idle first), or in the fenced list (a step or a copy may still read it). Both
lists are in the order in which their blocks lost the last owner.
"""

from typing import Any

from numpy.typing import NDArray

from blocktable._jit import i32, i64

I32 = NDArray[Any]
I64 = NDArray[Any]
Core = tuple[I64, I32, I32, I32, I64, I32, I64, I32, I32, I64, I32]
"""info, state, entries, dirty of the tables; meta, blocks, nodes, buckets, store, lines, copies."""
Words = tuple[I32, int]
"""Tokens as 32-bit words, and how many words of the input make one of the store."""

# info[g]: what the tables leave room for. Tokens per block over all ranks, tokens of a window or chunk, blocks of a
# state row, blocks per unit, and the first of the group's parts in a node.
SPAN, REACH, FIXED, DENSE, SEAT_BASE = 15, 14, 13, 12, 11

META_FIELDS = 40
(
    FREE,  # blocks on the stack, those never used included
    FREE_TOP,  # top of the stack; 0: take FRESH
    FRESH,  # the lowest block never used
    CACHED,  # blocks in the idle list
    HELD,  # blocks with an owner
    FENCED,  # blocks without an owner that may not be reissued yet
    RETIRED,  # the last fence retired
    CLOCK,  # blocks that lost their last owner so far
    SLOT_TOP,  # top of the stack of node slots; 0: take SLOT_FRESH
    SLOT_FRESH,
    SLOTS,  # node slots in use
    SERIAL_LAST,
    BLOCKLESS,  # nodes in the list of those that no block backs
    BLOCKLESS_MOST,  # more of them are forgotten, the oldest first
    COPIES,  # pending copies
    NUM_BLOCKS,
    UNIT,
    WORDS,  # words per token in the store
    PARTS,
    INDEXED,  # is there a prefix index
    SEED,
    RANK,
    LARGEST,  # the longest row that width and pool allow
    HIT_TOKENS,
    QUERY_TOKENS,
    EVICTIONS,
    POPPED,
    PUSHED,
    HASHED,
    COMPARED,
    NEEDED,  # of the call in progress: blocks to pop; of a refused one, what the error says
    AVAILABLE,
    SERVED,  # rows, and tokens, done before the call stopped
    TOKENS,
) = range(34)

LINE_FIELDS = 16
(
    LENGTH,
    FINAL,
    TAIL,  # last draft; 0: none, and then LENGTH = BASE
    TAIL_AT,  # position of its first token
    ROOT,  # the node of the row's salt; 0: the row is not in use
    SHARED,  # may the block that is written next have another owner, or back a node
    PLAN,  # of the call in progress: the final mark afterwards
    BASE,  # tokens that left the drafts: a whole number of units
    HEAD,  # first draft
    NODE,  # the node of the row's first BASE tokens; 0: what the row computes is not indexed
    TAKEN,  # of the call in progress: groups whose next block has been counted as to be copied
    WORK,  # of the call in progress: LIGHT, BLOCKS or HEAVY
) = range(12)
# Tokens and slots alone are to be written; blocks, drafts or nodes too; windows move, blocks are shared, or a row opens.
LIGHT, BLOCKS, HEAVY = range(3)
TIP = 7  # in the tables' state: the last live block, so that a decoding row need not look it up
# row & LOW31, word & LOW62: the compiler sees that no index made from it is negative, and drops that case.
LOW31, LOW62 = 2**31 - 1, 2**62 - 1
NO_LIMIT = 2**40  # more tokens, and more blocks, than there can be

BLOCK_FIELDS = 8
# REF: owners of the block; without one, minus the CLOCK when it lost the last. FENCE: the last fence it was given back under.
REF, SEAT, NEXT, PREV, MATE_NEXT, MATE_PREV, PINS, FENCE = range(8)
TARGET = 1 << 30  # in PINS, beside the number of pending copies from the block: one goes to it

NODE_FIELDS = 8
SERIAL, PARENT, PARENT_SERIAL, CHAIN, LATEST, HEIRS, OLDER, NEWER = range(8)  # then the head of each part's ring
PIN = 1 << 32  # HEIRS counts children, and in its upper half rows that go on from the node
ABSENT = -1  # in CHAIN: not in a bucket; in OLDER: not in the list of nodes without a block

LISTS = (i64[::1], i32[::1])  # meta, blocks
INDEX = (*LISTS, i64[::1], i32[::1], i32[::1])  # and nodes, buckets, store

# what a call was refused for, beside the codes of the tables
(
    GROW,  # not refused: node slots or room for copies are short, and the call is made again
    WIDEN,  # not refused: a token needs two words
    JOURNAL_FULL,  # not refused: what waits in the journal is to be written first
    SHORT_OF_BLOCKS,
    NEVER,
    IN_USE,
    NOT_IN_USE,
    OTHER_SALT,
    BAD_TOKEN,
    BAD_FINAL,
    UNKNOWN_TOKEN,
    BAD_LENGTH,
    TOO_SHORT,
    BAD_TOKENS,
    BAD_LIMIT,
    SAVE,  # not refused: the call may be, with some of its rows done, so what it changes is to be kept
) = range(101, 117)

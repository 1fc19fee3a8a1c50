"""Pictures as plain text: no colour is needed to read them."""

from collections.abc import Iterator

from blocktable._ints import ceil_div
from blocktable.cache import KVCache
from blocktable.tables import BlockTables
from blocktable.view.picture import Node, Part, Picture, RowPicture

__all__ = ["pool_map", "prefix_tree", "row", "text"]

MOST_MARKS = 4096  # blocks that are drawn one by one
SIGNS = {"gone": "x", "live": "=", "lookahead": "+", "tail": ".", "alignment": "|"}
SAYS = {
    "gone": "given up by the window",
    "live": "holds final tokens",
    "lookahead": "holds tokens that may still be rejected",
    "tail": "null until the row grows",
    "alignment": "null always: the kernel asks for this width",
}
WIDTH = 64


def text(cache: KVCache | BlockTables) -> str:
    """Return the pool, every row in use and the prefix tree of a live cache.

    >>> import blocktable
    >>> cache = blocktable.KVCache([blocktable.plan(max_model_len=32, block_size=4)], num_blocks=9, max_rows=4)
    >>> _ = cache.admit([2], [0, 6], [7, 7, 7, 7, 8, 9])
    >>> print(text(cache))
    8 blocks: 6 free, 0 cached, 2 held, 0 fenced
    aa......
    a row 2 · . free · - cached · ! fenced · # several rows
    <BLANKLINE>
    row 2 (a), group 0 full: 6 tokens, 6 final, 2 blocks of 4
    ==......
      live       columns 0..1   1 2   holds final tokens
      tail       columns 2..7   null until the row grows
    <BLANKLINE>
    prefixes
    `- 7 7 7 7: block 1 (a)
    """
    picture = Picture(cache)
    rows = [draw_row(picture, picture.row(r, g)) for r in picture.used for g in range(len(picture.groups))]
    return "\n\n".join([draw_pool(picture), *rows, draw_tree(picture)])


def pool_map(cache: KVCache | BlockTables) -> str:
    """Return the pool, a sign per block: whose it is, or that nobody holds it; of a large pool a sign stands for several."""
    return draw_pool(Picture(cache))


def row(cache: KVCache | BlockTables, row: int, group: int = 0) -> str:
    """Return one row: what is live, what may still be rejected, the tail, and what only the kernel's width asks for."""
    picture = Picture(cache)
    return draw_row(picture, picture.row(row, group))


def prefix_tree(cache: KVCache | BlockTables, *, most: int = 100) -> str:
    """Return what prompts would find cached, as a tree of at most ``most`` lines."""
    return draw_tree(Picture(cache), most)


def draw_pool(picture: Picture) -> str:
    """Draw the map and what its signs mean."""
    total = picture.num_blocks - 1
    counts = ", ".join(f"{count} {name}" for name, count in picture.counts.items())
    each = ceil_div(total, MOST_MARKS) or 1
    marks = [_mark(picture, range(b, min(b + each, total + 1))) for b in range(1, total + 1, each)]
    lines = ["".join(marks[i : i + WIDTH]) for i in range(0, len(marks), WIDTH)]
    rows = " · ".join(f"{picture.letter(r)} row {r}" for r in picture.used[:8])
    more = f" · and {len(picture.used) - 8} rows" if len(picture.used) > 8 else ""
    legend = f"{rows}{more}{' · ' if rows else ''}. free · - cached · ! fenced · # several rows"
    scale = [f"each sign stands for {each} blocks, the one of most of them"] if each > 1 else []
    return "\n".join([f"{total} blocks: {counts}", *lines, legend, *scale])


def _mark(picture: Picture, blocks: range) -> str:
    marks = [picture.mark(block) for block in blocks]
    return max(dict.fromkeys(marks), key=marks.count)


def draw_row(picture: Picture, row: RowPicture) -> str:
    """Draw a row's strip, and its parts with what they hold."""
    columns = sum(part.size for part in row.parts)
    blocks = sum(len(part.ids) for part in row.parts)
    head = f"row {row.row} ({picture.letter(row.row)}), {said(row)}, {blocks} blocks of {row.block_tokens}"
    named = [(f"columns {p.start}..{p.start + p.size - 1}", _ids(p), p) for p in row.parts]
    width = max((len(where) for where, _, _ in named), default=0)
    lines = [f"  {p.name:<9}  {where:<{width}}   {ids}{SAYS[p.name]}" for where, ids, p in named]
    scale = [f"  each sign stands for up to {ceil_div(columns, WIDTH)} columns"] if columns > WIDTH else []
    return "\n".join([head, _strip(row, columns), *scale, *lines])


def said(row: RowPicture) -> str:
    """Say which group's row it is, and how long, where that is known."""
    tokens = "" if row.length is None else f": {row.length} tokens, {row.final} final"
    return f"group {row.group} {row.kind}{tokens}"


def _strip(row: RowPicture, columns: int) -> str:
    """Return a sign per column, or of a wide row per several: then the rarest part among them, so that none is lost."""
    signs = "".join(SIGNS[part.name] * part.size for part in row.parts)
    each = ceil_div(columns, WIDTH) or 1
    groups = [signs[i : i + each] for i in range(0, columns, each)]
    return "".join(min(group, key=signs.count) for group in groups)


def _ids(part: Part) -> str:
    if not part.ids or part.name == "gone":
        return ""
    shown = " ".join(map(str, part.ids[:8]))
    return f"{shown}{f' … {part.ids[-1]}' if len(part.ids) > 8 else ''}   "


def draw_tree(picture: Picture, most: int = 100) -> str:
    """Draw the prefixes; a run without branches is one line."""
    lines = ["prefixes" if picture.roots else "prefixes: none"]
    for salt, nodes in picture.roots:
        if salt:
            lines.append(f"salt {salt[:12]!r}{'…' if len(salt) > 12 else ''}")
        lines += _branches(picture, nodes)
    return "\n".join([*lines[:most], f"… {len(lines) - most} more lines"] if len(lines) > most else lines)


def run_of(node: Node) -> list[Node]:
    """Return a node and what follows it as long as nothing branches off."""
    run = [node]
    while len(run[-1].children) == 1:
        run.append(run[-1].children[0])
    return run


def describe(picture: Picture, run: list[Node]) -> str:
    """Say what a run of prefixes is, and what backs it."""
    tokens = run[0].tokens
    shown = " ".join(map(str, tokens[:6])) + (" …" if len(tokens) > 6 or len(run) > 1 else "")
    blocks = [block for node in run for block in node.blocks]
    marks = "".join(dict.fromkeys(picture.mark(block) for block in blocks))
    ids = f"{blocks[0]}..{blocks[-1]}" if len(blocks) > 2 else " ".join(map(str, blocks))
    size = f", {sum(len(node.tokens) for node in run)} tokens" if len(run) > 1 else ""
    backed = f"block{'s' if len(blocks) > 1 else ''} {ids} ({marks})" if blocks else "no block any more"
    return f"{shown}: {backed}{size}"


def _branches(picture: Picture, nodes: list[Node]) -> Iterator[str]:
    stack = [(node, "", i == len(nodes) - 1) for i, node in enumerate(nodes)][::-1]
    while stack:
        node, indent, last = stack.pop()
        run = run_of(node)
        yield f"{indent}{'`- ' if last else '|- '}{describe(picture, run)}"
        inner = indent + ("   " if last else "|  ")
        children = run[-1].children
        stack += [(child, inner, i == len(children) - 1) for i, child in enumerate(children)][::-1]

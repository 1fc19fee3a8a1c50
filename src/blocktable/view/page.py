"""Pictures as one HTML file without scripts: the pool as a grid, rows as strips, prefixes as a tree to fold."""

from html import escape

from blocktable._page import write_page
from blocktable.cache import KVCache
from blocktable.tables import BlockTables
from blocktable.view.picture import Node, Picture, RowPicture
from blocktable.view.text import SAYS, describe, run_of, said

__all__ = ["html"]

MOST_BLOCKS, MOST_ROWS, MOST_NODES = 20_000, 200, 2_000
HUES = 6


def html(cache: KVCache | BlockTables, title: str = "KV cache") -> str:
    """Return a page of a live cache: letters tell rows apart, colours only repeat them; light and dark, no network.

    >>> import blocktable
    >>> cache = blocktable.KVCache([blocktable.plan(max_model_len=32, block_size=4)], num_blocks=9, max_rows=4)
    >>> "8 blocks: 8 free" in html(cache)
    True
    """
    picture = Picture(cache)
    rows = [picture.row(row, g) for row in picture.used[:MOST_ROWS] for g in range(len(picture.groups))]
    left_out = len(picture.used) - MOST_ROWS
    parts = {
        "counts": f"{picture.num_blocks - 1} blocks: " + ", ".join(f"{n} {name}" for name, n in picture.counts.items()),
        "pool": _pool(picture),
        "rows": "".join(_row(picture, row) for row in rows) + (f"<p>{left_out} rows more</p>" if left_out > 0 else ""),
        "prefixes": _tree(picture),
    }
    return write_page("blocktable.view", "page.html", parts, title=title)


def _pool(picture: Picture) -> str:
    last = min(picture.num_blocks - 1, MOST_BLOCKS)
    more = f"<p>{picture.num_blocks - 1 - last} blocks more</p>" if last < picture.num_blocks - 1 else ""
    return f'<div class="pool">{"".join(_block(picture, block) for block in range(1, last + 1))}</div>{more}'


def _block(picture: Picture, block: int) -> str:
    owners = sorted(set(picture.owners.get(block, ())))
    status = "shared" if len(owners) > 1 else picture.status[block]
    hue = f" hue{picture.used.index(owners[0]) % HUES}" if len(owners) == 1 else ""
    held = f"rows {', '.join(map(str, owners))}" if len(owners) > 1 else f"row {owners[0]}" if owners else status
    return f'<i class="{status}{hue}" title="block {block}: {held}">{escape(picture.mark(block))}</i>'


def _row(picture: Picture, row: RowPicture) -> str:
    strip = "".join(
        f'<span class="{part.name}" style="flex-grow:{part.size}" title="{_says(part.name, part.start, part.size)}">'
        f"{part.name}</span>"
        for part in row.parts
    )
    lines = "".join(
        f"<tr><td>{part.name}</td><td>{part.start}..{part.start + part.size - 1}</td>"
        f"<td>{' '.join(map(str, part.ids)) if part.name != 'gone' else ''}</td><td>{SAYS[part.name]}</td></tr>"
        for part in row.parts
    )
    return (
        f"<details><summary>{picture.letter(row.row)} · row {row.row}, {said(row)}"
        f'<div class="strip">{strip}</div></summary><div class="scroll"><table><tr><th>part</th>'
        f"<th>columns</th><th>blocks of {row.block_tokens} tokens</th><th></th></tr>{lines}</table></div></details>"
    )


def _says(name: str, start: int, count: int) -> str:
    return f"columns {start} to {start + count - 1}: {SAYS[name]}"


def _tree(picture: Picture) -> str:
    if not picture.roots:
        return "<p>none</p>"
    left = [MOST_NODES]
    parts = []
    for salt, nodes in picture.roots:
        parts.append(
            f"<p>{'salt ' + escape(repr(salt[:24])) if salt else 'without a salt'}</p>{_branch(picture, nodes, left)}"
        )
    return "".join(parts)


def _branch(picture: Picture, nodes: list[Node], left: list[int]) -> str:
    """Return a list of prefixes; one that branches can be folded. Branches nest as deep as prompts part ways."""
    items = []
    for node in nodes:
        if left[0] <= 0:
            items.append("<li>…</li>")
            break
        left[0] -= 1
        run = run_of(node)
        prefix, children = escape(describe(picture, run)), run[-1].children
        inner = f"<details open><summary>{prefix}</summary>{_branch(picture, children, left)}</details>"
        items.append(f"<li>{inner if children else prefix}</li>")
    return f"<ul>{''.join(items)}</ul>"

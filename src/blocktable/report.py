"""A study or one simulation as a page: one file, no network, light and dark, every figure also as a table.

The figures are plain data that plotly's own script draws in the browser; the page forbids itself every request. What a
figure leaves out it says: a point stands for so many steps, the line is their mean, the band reaches from least to most.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from blocktable._page import write_page
from blocktable.results import COMPARED, differing, label, shown
from blocktable.study import Record

__all__ = ["page"]

# Told apart by readers with any colour vision (Okabe and Ito); beyond these, by dashes too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")

Trace = dict[str, Any]


class Figure(NamedTuple):
    """What one figure shows, and the same numbers as rows; ``head`` names their columns."""

    title: str
    note: str
    traces: list[Trace]
    axes: tuple[str, str]
    head: tuple[str, ...]
    rows: list[tuple[object, ...]]
    kind: str = "linear"


def page(records: Sequence[Record], source: str) -> str:
    """Return a page of HTML about simulated cells (records of `study.run_cell`); ``source`` names their requests.

    Needs plotly, whose script of 5 MB becomes a part of the page.
    """
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - large, and only here

    names = differing(records)
    ran = [record for record in records if record.get("curves")]
    figures = [*_trade_offs(ran, names), *_over_time(ran, names)] if ran else []
    title = f"{len(records)} cells over {source}" if len(records) > 1 else f"One pool under {source}"
    parts = {
        "about": escape(_about(records, ran)),
        "comparison": _comparison(records, names),
        "figures": "\n".join(_section(i, figure) for i, figure in enumerate(figures)),
        "data": _script([{"traces": f.traces, "axes": f.axes, "kind": f.kind} for f in figures]),
        "plotly": get_plotlyjs(),
    }
    return write_page("blocktable", "report.html", parts, title=title, scripts=True)


def _about(records: Sequence[Record], ran: Sequence[Record]) -> str:
    if not ran:
        return "No cell could run."
    points = max(record["curves"]["steps_per_point"] for record in ran)
    most = max(record["steps"] for record in ran)
    drawn = f"each point of a curve stands for up to {points:,} steps" if points > 1 else "every step is drawn"
    lines = (
        "the line is their mean and the band reaches from the least to the most"
        if len(records) == 1
        else "lines are means"
    )
    stopped = " The run was interrupted: these are its steps so far." if any(r.get("interrupted") for r in ran) else ""
    return f"Up to {most:,} steps; {drawn}{f', {lines}' if points > 1 else ''}.{stopped}"


def _comparison(records: Sequence[Record], names: Sequence[str]) -> str:
    head = ("cell", "check", *(heading for heading, _ in COMPARED.values()), "why")
    rows = []
    for record in records:
        mark = "★ " if record["front"] and len(records) > 1 else ""
        why = record["unfit"] or record.get("finding") or record["verdict_reason"]
        numbers = (shown(record, name) for name in COMPARED)
        rows.append((mark + label(record, names), record["verdict"] or "-", *numbers, why))
    return _table(head, rows)


def _trade_offs(ran: Sequence[Record], names: Sequence[str]) -> list[Figure]:
    if len(ran) < 2:
        return []
    head = ("cell", "pool tokens", "first token, mean steps", "hit rate", "preempted", "on the front")
    rows: list[tuple[object, ...]] = [
        (
            label(r, names),
            r["pool_tokens"],
            r["mean_first_token_steps"],
            round(r["hit_rate"], 4),
            r["preemptions"],
            "yes" if r["front"] else "no",
        )
        for r in ran
    ]
    note = "Filled: no other cell is as good in pool, hits, preemptions and first tokens, and better in one."
    return [
        Figure(
            "Pool against first tokens",
            note,
            _dots(ran, names, "mean_first_token_steps"),
            ("pool, tokens", "steps"),
            head,
            rows,
        ),
        Figure("Pool against hit rate", note, _dots(ran, names, "hit_rate"), ("pool, tokens", "hit rate"), head, rows),
    ]


def _dots(ran: Sequence[Record], names: Sequence[str], field: str) -> list[Trace]:
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(r, names),
            "x": [r["pool_tokens"]],
            "y": [r[field]],
            "marker": {
                "size": 13,
                "color": COLOURS[i % len(COLOURS)],
                "symbol": SYMBOLS[i // len(COLOURS) % len(SYMBOLS)] + ("" if r["front"] else "-open"),
            },
        }
        for i, r in enumerate(ran)
    ]


def _over_time(ran: Sequence[Record], names: Sequence[str]) -> list[Figure]:
    alone = len(ran) == 1
    blocks = ("held", "cached", "free")
    figures = []
    if alone:
        traces = [trace for i, name in enumerate(blocks) for trace in _band(ran[0]["curves"], name, i)]
        rows = _gauge_rows(ran, names, blocks)
        head = ("step", "seconds", *(f"{name}, {part}" for name in blocks for part in ("least", "mean", "most")))
        note = "Held by rows, kept for later prompts, and free; together the pool."
        figures.append(Figure("Blocks", note, traces, ("simulated seconds", "blocks"), head, rows))
    else:
        titles = ("Pool held by rows", "Pool kept for later prompts", "Pool free")
        shares = [_share(record, blocks) for record in ran]
        figures += [
            _gauge(shares, names, name, title, "Pools and blocks differ in size, so as a share of the pool.", "share")
            for name, title in zip(blocks, titles, strict=True)
        ]
    if any(record["prefix_query_tokens"] for record in ran):
        note = "Of the prompts' tokens looked for since the point before."
        figures.append(_counter(ran, names, "Hit rate", note, "share", _hit_rates))
    figures += [
        _gauge(ran, names, "running", "Requests running", "", "requests"),
        _gauge(ran, names, "waiting", "Requests waiting", "Arrived or preempted, without a row.", "requests"),
        _counter(ran, names, "Preemptions", "Since the start.", "preemptions", lambda c: c["preemptions"]),
        _gauge(ran, names, "wasted_tokens", "Wasted cells", "Cells of held blocks that hold no token.", "tokens"),
        _lengths(ran, names),
    ]
    return figures


def _share(record: Record, gauges: Sequence[str]) -> Record:
    """Return the record with gauges in blocks as shares of its pool."""
    pool, curves = record["usable_blocks"], record["curves"]
    shares = {
        name: {part: [round(value / pool, 4) for value in values] for part, values in curves[name].items()}
        for name in gauges
    }
    return record | {"curves": curves | shares}


def _gauge(ran: Sequence[Record], names: Sequence[str], name: str, title: str, note: str, unit: str) -> Figure:
    if len(ran) == 1:
        traces = _band(ran[0]["curves"], name, 0)
    else:
        traces = [_line(r["curves"], r["curves"][name]["mean"], i, label(r, names)) for i, r in enumerate(ran)]
    head = (*_cell_head(ran), "step", "seconds", "least", "mean", "most")
    return Figure(title, note, traces, ("simulated seconds", unit), head, _gauge_rows(ran, names, [name]))


def _counter(ran: Sequence[Record], names: Sequence[str], title: str, note: str, unit: str, values: Any) -> Figure:
    traces, rows = [], []
    for i, record in enumerate(ran):
        curves, found = record["curves"], values(record["curves"])
        traces.append(_line(curves, found, i, label(record, names)))
        cell = (label(record, names),) if len(ran) > 1 else ()
        rows += [(*cell, *row) for row in zip(curves["step"], curves["seconds"], found, strict=True)]
    return Figure(title, note, traces, ("simulated seconds", unit), (*_cell_head(ran), "step", "seconds", unit), rows)


def _hit_rates(curves: dict[str, Any]) -> list[float | None]:
    """Return the share of hits between one point and the next, None where nothing was looked for."""
    hits, queries = ([0, *curves[name]] for name in ("hit_tokens", "query_tokens"))
    steps = zip(hits, hits[1:], queries, queries[1:], strict=False)
    return [round((h1 - h0) / (q1 - q0), 4) if q1 > q0 else None for h0, h1, q0, q1 in steps]


def _lengths(ran: Sequence[Record], names: Sequence[str]) -> Figure:
    traces, rows = [], []
    for i, record in enumerate(ran):
        found = record["curves"]["row_lengths"]
        total = max(sum(found["rows"]), 1)
        shares = [round(count / total, 5) for count in found["rows"]]
        bars = {"type": "bar", "x": [f"≤ {n:,}" for n in found["up_to"]], "y": shares, "name": label(record, names)}
        traces.append(bars | {"marker": {"color": COLOURS[i % len(COLOURS)]}})
        cell = (label(record, names),) if len(ran) > 1 else ()
        rows += [(*cell, *row) for row in zip(found["up_to"], found["rows"], shares, strict=True)]
    note = "Of the running rows of all steps; each bar up to twice the tokens of the one before."
    head = (*_cell_head(ran), "tokens up to", "rows, summed over steps", "share")
    return Figure("Row lengths", note, traces, ("tokens of a row", "share"), head, rows, "category")


def _cell_head(ran: Sequence[Record]) -> tuple[str, ...]:
    return ("cell",) if len(ran) > 1 else ()


def _gauge_rows(ran: Sequence[Record], names: Sequence[str], gauges: Sequence[str]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for record in ran:
        curves = record["curves"]
        columns = [curves[gauge][part] for gauge in gauges for part in ("min", "mean", "max")]
        cell = (label(record, names),) if len(ran) > 1 else ()
        rows += [(*cell, *row) for row in zip(curves["step"], curves["seconds"], *columns, strict=True)]
    return rows


def _line(curves: dict[str, Any], values: Sequence[object], i: int, name: str) -> Trace:
    style = {"color": COLOURS[i % len(COLOURS)], "dash": DASHES[i // len(COLOURS) % len(DASHES)], "width": 2}
    return {"type": "scatter", "mode": "lines", "x": curves["seconds"], "y": values, "name": name, "line": style}


def _band(curves: dict[str, Any], name: str, i: int) -> list[Trace]:
    """Return the mean as a line and, below it, the band from least to most."""
    values, x = curves[name], curves["seconds"]
    edge = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": f"{COLOURS[i]}40"}
    return [
        edge | {"y": values["min"], "legendgroup": name},
        edge | fill | {"y": values["max"], "legendgroup": name},
        _line(curves, values["mean"], i, name) | {"legendgroup": name, "showlegend": True},
    ]


def _section(i: int, figure: Figure) -> str:
    note = f"<p>{escape(figure.note)}</p>" if figure.note else ""
    return (
        f'<section><h2>{escape(figure.title)}</h2>{note}<div class="figure" id="figure-{i}"></div>'
        f"<details><summary>As a table</summary>{_table(figure.head, figure.rows)}</details></section>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cells(values: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}>{escape('-' if value is None else str(value))}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _script(data: object) -> str:
    # "<" could end the script element from inside a string.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

"""Results of a study as a table: a row per cell, as Parquet or CSV, and what a comparison shows of each."""

import csv
from collections.abc import Sequence
from pathlib import Path

from blocktable.study import Record

__all__ = ["COMPARED", "differing", "label", "shown", "write_results"]

_NOT_COLUMNS = ("curves", "bad_lines", "refused_lines")  # lists, of use in a report or a single run only

SETTINGS = {
    "block_size": "block {:,}",
    "num_blocks": "{:,} blocks",
    "pool_tokens": "pool {:,}",
    "backend": "{}",
    "prefix_cache": "{}",
    "max_model_len": "len {:,}",
    "max_rows": "{:,} rows",
    "token_budget": "budget {:,}",
}
COMPARED = {
    "pool_tokens": ("pool tokens", "{:,}"),
    "hit_rate": ("hit rate", "{:.1%}"),
    "preemptions": ("preempted", "{:,}"),
    "mean_first_token_steps": ("first token", "{:,.1f}"),
    "p95_first_token_steps": ("p95", "{:,.1f}"),
    "peak": ("peak", "{:.1%}"),
    "waste": ("waste", "{:.2%}"),
    "delta_bytes": ("bytes sent", "{:,}"),
    "us_per_step": ("µs/step", "{:,.0f}"),
}
"""Column of a record -> its heading and how a number is written. First tokens are counted in steps."""


def differing(records: Sequence[Record]) -> list[str]:
    """Return the settings in which the cells differ; of the pool's two measures the one that every cell has, as given.

    >>> differing([{"block_size": 16, "max_rows": 8}, {"block_size": 32, "max_rows": 8}])
    ['block_size']
    """
    values = {name: {record.get(name) for record in records} - {None} for name in SETTINGS}
    known = {name: sum(record.get(name) is not None for record in records) for name in SETTINGS}
    pool = min("num_blocks", "pool_tokens", key=lambda name: (len(values[name]) < 2, -known[name], len(values[name])))
    other = {"num_blocks": "pool_tokens", "pool_tokens": "num_blocks"}[pool]
    return [name for name in SETTINGS if len(values[name]) > 1 and name != other]


def label(record: Record, names: Sequence[str]) -> str:
    """Return what tells a cell from the others.

    >>> label({"block_size": 16, "backend": None, "prefix_cache": "lru"}, ["block_size", "backend", "prefix_cache"])
    'block 16 · lru'
    """
    parts = [SETTINGS[name].format(record[name]) for name in names if record.get(name) is not None]
    return " · ".join(parts) or "one cell"


def shown(record: Record, name: str) -> str:
    """Return a compared number as text, a dash where the cell did not run."""
    value = record.get(name)
    return "-" if value is None or record["unfit"] else COMPARED[name][1].format(value)


def write_results(path: Path, records: Sequence[Record]) -> None:
    """Write a row per cell; a column that a cell does not have is empty there. The ending of the name is the format."""
    names = list(dict.fromkeys(name for record in records for name in record if name not in _NOT_COLUMNS))
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(records)
        return
    import pyarrow as pa  # noqa: PLC0415 - large, and only for this format
    from pyarrow import parquet  # noqa: PLC0415

    parquet.write_table(pa.table({name: [record.get(name) for record in records] for name in names}), path)

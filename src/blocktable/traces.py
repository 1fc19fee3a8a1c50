"""Request traces: when each request came, how long its prompt was, how much it generated.

Two public formats are read, told apart by their content: JSON lines as Mooncake publishes them and CSV as Azure does.
A line that is no request is named by its number and counted, never dropped in silence; beyond 1 % of such lines the
whole file is refused. `synthetic` makes an hour of traffic from a seed instead.
"""

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktable.errors import ArgumentError

__all__ = ["BadLine", "Request", "Trace", "read_trace", "synthetic"]

MAX_TOKENS = 2**31 - 1  # positions fit int32
MAX_TIMESTAMP = 1e15  # milliseconds, some 30,000 years
MAX_LINE = 2**24  # bytes; a longer line is no request, and reading it whole would let a file exhaust the memory
MOST_BAD = 100  # one bad line in so many is accepted
CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FORMATS = (
    'give JSON lines with "timestamp" (milliseconds), "input_length" and "output_length", '
    f"or CSV with the columns {', '.join(CSV_COLUMNS)}"
)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a trace that is no request: its number, from 1, and why."""

    number: int
    reason: str


class Request(msgspec.Struct, frozen=True):
    """One request as a line of the Mooncake format spells it: milliseconds and tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMESTAMP)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]] = []


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival, one entry each in every array.

    ``arrival`` float64 seconds since the first request · ``input_length``, ``output_length`` int64 tokens · ``line``
    int64, the line each came from · ``hash_ids`` int64, those of request i between ``hash_indptr[i]`` and
    ``hash_indptr[i + 1]``, equal ids meaning equal prefix blocks (empty where the format has none) · ``bad_lines`` what
    was not a request.
    """

    arrival: NDArray[np.float64]
    input_length: NDArray[np.int64]
    output_length: NDArray[np.int64]
    line: NDArray[np.int64]
    hash_indptr: NDArray[np.int64]
    hash_ids: NDArray[np.int64]
    bad_lines: tuple[BadLine, ...] = ()

    def __len__(self) -> int:
        return self.arrival.size

    def first(self, count: int) -> "Trace":
        """Return the first ``count`` requests, all of them when there are fewer.

        >>> len(synthetic(seed=0, max_model_len=4096).first(10))
        10
        """
        if count < 1:
            raise ArgumentError(
                f"cannot keep {count} requests", values={"count": count}, remedy="keep 1 request or more"
            )
        indptr = self.hash_indptr[: count + 1]
        return Trace(
            self.arrival[:count],
            self.input_length[:count],
            self.output_length[:count],
            self.line[:count],
            indptr,
            self.hash_ids[: indptr[-1]],
            self.bad_lines,
        )


def read_trace(path: str | Path) -> Trace:
    """Read a trace in the Mooncake JSON-lines or the Azure CSV format, whichever its content is.

    Blank lines are nothing; a byte order mark and either line ending are accepted. Raises OSError when the file cannot
    be read, and ArgumentError, with the first bad lines, when it holds no request, is in neither format, lacks a column,
    or has more than 1 % bad lines.
    """
    with Path(path).open("rb") as file:
        lines = _lines(file)
        first = next(lines, None)
        if first is None:
            raise ArgumentError(f"{path} holds no line", values={"path": str(path)}, remedy=FORMATS)
        columns = _cells(first[1])
        if set(CSV_COLUMNS).isdisjoint(columns):
            return _collect(path, itertools.chain([first], lines), _json_request)
        return _collect(path, lines, _csv_request(path, columns))


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for every line that is not blank, without its ending, at most one byte over MAX_LINE long."""
    number, text = 1, file.readline(MAX_LINE + 1).removeprefix(b"\xef\xbb\xbf")
    while text:
        whole = text.endswith(b"\n")
        text = text.strip()
        if text:
            yield number, text
        while not whole:  # the rest of a line that is too long, or the end of the file
            rest = file.readline(MAX_LINE)
            whole = not rest or rest.endswith(b"\n")
        number, text = number + 1, file.readline(MAX_LINE + 1)


def _collect(path: str | Path, lines: Iterable[tuple[int, bytes]], parse: Callable[[bytes], Request]) -> Trace:
    numbers: list[int] = []
    requests: list[Request] = []
    bad: list[BadLine] = []
    for number, text in lines:
        try:
            requests.append(parse(text))
            numbers.append(number)
        except (ValueError, msgspec.MsgspecError) as error:
            reason = str(error) if len(text) <= MAX_LINE else f"longer than {MAX_LINE} bytes"
            bad.append(BadLine(number, reason[:200]))
    total = len(bad) + len(requests)
    if not total:
        raise ArgumentError(f"{path} holds no request", values={"path": str(path)}, remedy=FORMATS)
    if len(bad) * MOST_BAD > total:
        shown = "".join(f"; line {line.number}: {line.reason}" for line in bad[:5])
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ArgumentError(
            f"{len(bad)} of {total} lines of {path} are no requests{shown}{more}",
            values={"path": str(path), "bad": len(bad), "lines": total, "bad_lines": tuple(bad)},
            remedy=f"mend or remove them, 1 % is accepted: {FORMATS}",
        )
    return _trace(requests, numbers, tuple(bad))


_json_request = msgspec.json.Decoder(Request).decode


def _csv_request(path: str | Path, columns: list[str]) -> Callable[[bytes], Request]:
    """Return what reads one line under this header; extra columns and any order of columns are accepted."""
    missing = [name for name in CSV_COLUMNS if name not in columns]
    if missing:
        raise ArgumentError(
            f"{path} has no column {' and no column '.join(missing)}",
            values={"path": str(path), "missing": tuple(missing)},
            remedy=FORMATS,
        )
    time, context, generated = (columns.index(name) for name in CSV_COLUMNS)

    def parse(text: bytes) -> Request:
        cells = _cells(text)
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} fields where the header has {len(columns)}")
        return Request(
            _milliseconds(cells[time]),
            _tokens(cells[context], CSV_COLUMNS[1], least=1),
            _tokens(cells[generated], CSV_COLUMNS[2], least=0),
        )

    return parse


def _cells(text: bytes) -> list[str]:
    # Line by line and not strict: an unclosed quote must not swallow the lines after it.
    try:
        return [cell.strip() for cell in next(csv.reader([text.decode(errors="replace")]))]
    except csv.Error:  # a field of more than 128 KiB, or a carriage return inside the line
        return []


def _milliseconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() * 1000


def _tokens(text: str, name: str, least: int) -> int:
    # int() alone would take "1_000", other scripts' digits, and numbers long enough to stall on.
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= MAX_TOKENS):
        raise ValueError(f"{name} is {text[:40]!r}, not an integer of {least}..{MAX_TOKENS}")
    return int(text)


def _trace(requests: list[Request], numbers: list[int], bad: tuple[BadLine, ...] = ()) -> Trace:
    arrival = np.array([request.timestamp for request in requests]) / 1000
    order = np.argsort(arrival, kind="stable")  # requests of one moment keep the order of their lines
    hashes = [requests[i].hash_ids for i in order]
    return Trace(
        arrival[order] - arrival.min(),
        np.array([request.input_length for request in requests], np.int64)[order],
        np.array([request.output_length for request in requests], np.int64)[order],
        np.array(numbers, np.int64)[order],
        np.cumsum([0, *map(len, hashes)], dtype=np.int64),
        np.array([i for ids in hashes for i in ids], np.int64),
        bad,
    )


def synthetic(seed: int, *, max_model_len: int, seconds: float = 3600.0, rate: float = 1.0) -> Trace:
    """Make traffic from a seed: Poisson arrivals with bursts, short chats beside a long tail, all within max_model_len.

    ``rate`` is the mean of requests per second outside bursts. A tenth of the minutes are bursts at five times that.
    Seven of ten requests are chats of some hundred tokens; three carry documents whose length has no upper end but the
    limit. No request is longer than ``max_model_len``, prompt and output together.

    >>> trace = synthetic(seed=1, max_model_len=9416)
    >>> int((trace.input_length + trace.output_length).max()) <= 9416
    True
    """
    if max_model_len < 2 or seconds <= 0 or rate <= 0:
        raise ArgumentError(
            f"no traffic of {rate} requests/s for {seconds} s fits max_model_len {max_model_len}",
            values={"max_model_len": max_model_len, "seconds": seconds, "rate": rate},
            remedy="a request has a token of prompt and one of output; seconds and rate are positive",
        )
    if seed < 0:
        raise ArgumentError(f"seed is {seed}", values={"seed": seed}, remedy="a seed is 0 or more")
    random = np.random.default_rng(seed)
    minutes = math.ceil(seconds / 60)
    rates = np.where(random.random(minutes) < 0.1, 5.0, 1.0) * rate * 60
    counts = np.maximum(random.poisson(rates), np.arange(minutes) == 0)  # at least one request
    arrival = np.sort((np.repeat(np.arange(minutes), counts) + random.random(counts.sum())) * (seconds / minutes))
    chat = random.random(arrival.size) < 0.7
    prompt = np.where(chat, random.lognormal(6.2, 0.8, arrival.size), random.lognormal(8.3, 1.1, arrival.size))
    output = random.lognormal(5.2, 0.8, arrival.size)
    output_length = np.clip(output, 1, max(max_model_len // 4, 1)).astype(np.int64)
    input_length = np.clip(prompt, 1, max_model_len - output_length).astype(np.int64)
    number = np.arange(1, arrival.size + 1, dtype=np.int64)
    nothing = np.zeros(arrival.size + 1, np.int64)
    return Trace(arrival - arrival[0], input_length, output_length, number, nothing, np.zeros(0, np.int64))

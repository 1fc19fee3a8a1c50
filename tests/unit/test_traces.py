"""Reading traces: both formats, every way a line can be wrong, and the synthetic hour."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from blocktable import traces
from blocktable.errors import ArgumentError
from blocktable.traces import read_trace, synthetic

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = b"2023-11-16 18:15:46.6805900,374,44"


def mooncake(timestamp: object = 0, prompt: object = 5, output: object = 3, **more: object) -> bytes:
    return json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": output} | more).encode()


def write(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path = folder / "trace"
    path.write_bytes(end.join(lines) + end)
    return path


def test_mooncake_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path, mooncake(500, 9, 2, hash_ids=[7, 8]), mooncake(1250, 5, 0), mooncake(3000, 6, 1, hash_ids=[7])
    )
    trace = read_trace(path)
    assert len(trace) == 3
    assert trace.arrival.tolist() == [0.0, 0.75, 2.5]
    assert trace.input_length.tolist() == [9, 5, 6]
    assert trace.output_length.tolist() == [2, 0, 1]
    assert trace.line.tolist() == [1, 2, 3]
    assert (trace.hash_indptr.tolist(), trace.hash_ids.tolist()) == ([0, 2, 2, 3], [7, 8, 7])
    assert trace.bad_lines == ()
    first = trace.first(1)
    assert (len(first), first.hash_indptr.tolist(), first.hash_ids.tolist()) == (1, [0, 2], [7, 8])
    assert len(trace.first(10**12)) == 3


def test_azure_lines_in_any_column_order_and_with_extra_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b'Model,"GeneratedTokens" ,TIMESTAMP,ContextTokens',
        b"x,44,2023-11-16 18:15:46.6805900,374",
        b"y,109,2023-11-16 18:15:50.6805900,396",
        b"z,1,2023-11-16 20:15:51.680590+02:00, 8 ",
    )
    trace = read_trace(path)
    assert trace.arrival == pytest.approx([0, 4, 5], abs=1e-5)
    assert trace.input_length.tolist() == [374, 396, 8]
    assert trace.output_length.tolist() == [44, 109, 1]
    assert trace.line.tolist() == [2, 3, 4]


def test_requests_are_sorted_by_arrival_and_ties_keep_their_order(tmp_path: Path) -> None:
    path = write(
        tmp_path, mooncake(9, 1, hash_ids=[1]), mooncake(4, 2, hash_ids=[2, 2]), mooncake(9, 3), mooncake(4, 4)
    )
    trace = read_trace(path)
    assert trace.input_length.tolist() == [2, 4, 1, 3]
    assert trace.line.tolist() == [2, 4, 1, 3]
    assert trace.hash_ids[trace.hash_indptr[2] : trace.hash_indptr[3]].tolist() == [1]
    assert trace.hash_ids[trace.hash_indptr[0] : trace.hash_indptr[1]].tolist() == [2, 2]


@pytest.mark.parametrize("lines", [[mooncake(1), mooncake(2)], [HEADER, AZURE, AZURE]])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\n \n"])
@pytest.mark.parametrize("cut", [False, True])
def test_byte_order_mark_line_endings_and_blank_lines(
    tmp_path: Path, lines: list[bytes], end: bytes, start: bytes, cut: bool
) -> None:
    path = tmp_path / "trace"
    text = start + end.join([*lines, b"  "]) + end
    path.write_bytes(text.rstrip() if cut else text)
    trace = read_trace(path)
    assert len(trace) == 2
    assert trace.bad_lines == ()
    assert trace.line[-1] == len(lines) + start.count(b"\n")


BAD_JSON = [
    (b"{", "malformed|truncated"),
    (mooncake()[:-9], "malformed|truncated"),
    (b"\x00\x00\x00", "malformed"),
    (mooncake().replace(b"5", b"\x005"), "malformed"),
    (b"\xff\xfe{", "malformed"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'{"timestamp": 1, "input_length": 2}', "output_length"),
    (b'{"timestamp": 1, "output_length": 2}', "input_length"),
    (mooncake(prompt=0), "input_length"),
    (mooncake(prompt=-1), "input_length"),
    (mooncake(prompt=2**31), "input_length"),
    (mooncake(prompt=10**400), "input_length|range"),
    (mooncake(prompt=1.5), "input_length"),
    (mooncake(prompt="5"), "input_length"),
    (mooncake(prompt=True), "input_length"),
    (mooncake(prompt=None), "input_length"),
    (mooncake(output=-1), "output_length"),
    (mooncake(output=2**31), "output_length"),
    (mooncake(-1), "timestamp"),
    (mooncake(1e16), "timestamp"),
    (mooncake(float("nan")), "malformed"),
    (b'{"timestamp": 1e999, "input_length": 2, "output_length": 2}', "timestamp|range"),
    (mooncake(hash_ids=[-1]), "hash_ids"),
    (mooncake(hash_ids=[2**63]), "hash_ids"),
    (mooncake(hash_ids=7), "hash_ids"),
    (mooncake() + mooncake(), "malformed|trailing"),
    (b'{"timestamp":' * 5000, "recursion|malformed|depth|float|truncated"),
]
BAD_CSV = [
    (b"2023-11-16 18:15:46,374", "2 fields"),
    (b"2023-11-16 18:15:46,374,44,1", "4 fields"),
    (b'2023-11-16 18:15:46,"374,44', "2 fields"),
    (b"yesterday,374,44", "isoformat"),
    (b"nan,374,44", "isoformat"),
    (b",374,44", "isoformat"),
    (b"2023-13-16 18:15:46,374,44", "month"),
    (b"2023-11-16 18:15:46,,44", "ContextTokens"),
    (b"2023-11-16 18:15:46,0,44", "ContextTokens"),
    (b"2023-11-16 18:15:46,-5,44", "ContextTokens"),
    (b"2023-11-16 18:15:46,374.0,44", "ContextTokens"),
    (b"2023-11-16 18:15:46,nan,44", "ContextTokens"),
    (b"2023-11-16 18:15:46,1_000,44", "ContextTokens"),
    (b"2023-11-16 18:15:46,2147483648,44", "ContextTokens"),
    (b"2023-11-16 18:15:46," + b"9" * 10**5 + b",44", "ContextTokens"),
    (b"2023-11-16 18:15:46," + b"9" * 10**6 + b",44", "fields"),
    ("2023-11-16 18:15:46,٣٧٤,44".encode(), "ContextTokens"),
    (b"2023-11-16 18:15:46,374,\x0044", "GeneratedTokens"),
    (b"2023-11-16 18:15:46,374,-1", "GeneratedTokens"),
    (b"2023-11-16 18:15:46,374,\xff\xfe", "GeneratedTokens"),
    (b"a\rb,374,44", "fields"),
]
GOOD = [([], mooncake(7), bad, reason) for bad, reason in BAD_JSON] + [
    ([HEADER], AZURE, bad, reason) for bad, reason in BAD_CSV
]


@pytest.mark.parametrize(("head", "good", "bad", "reason"), GOOD)
def test_a_bad_line_is_named_by_number_and_one_percent_is_accepted(
    tmp_path: Path, head: list[bytes], good: bytes, bad: bytes, reason: str
) -> None:
    trace = read_trace(write(tmp_path, *head, *[good] * 50, bad, *[good] * 49))
    assert len(trace) == 99
    (line,) = trace.bad_lines
    assert line.number == len(head) + 51
    assert any(word in line.reason for word in reason.split("|")), line.reason
    assert len(line.reason) <= 200

    with pytest.raises(ArgumentError, match=f"1 of 99 lines .* line {len(head) + 51}: ") as caught:
        read_trace(write(tmp_path, *head, *[good] * 50, bad, *[good] * 48))
    assert (caught.value.bad, caught.value.lines) == (1, 99)


def test_a_bad_first_line_hides_no_format(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, b"\x00garbage", *[mooncake()] * 99))
    assert [line.number for line in trace.bad_lines] == [1]


def test_a_line_without_end_is_bad_and_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE", 100)
    for size in (101, 150, 200, 201, 1000):
        trace = read_trace(write(tmp_path, mooncake(), b"x" * size, *[mooncake()] * 98))
        assert len(trace) == 99
        assert (trace.bad_lines[0].number, trace.bad_lines[0].reason) == (2, "longer than 100 bytes")
        assert trace.line[-1] == 100


def test_many_bad_lines_are_counted_and_the_first_five_shown(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"9 of 10 lines .* line 1: .* line 5: .*; and 4 more") as caught:
        read_trace(write(tmp_path, *[b"bad"] * 9, mooncake()))
    assert "line 6" not in str(caught.value)
    assert len(caught.value.bad_lines) == 9  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", HEADER + b"\n", b"  "])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"holds no (line|request); give JSON lines"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        (b"TIMESTAMP,ContextTokens", ("GeneratedTokens",)),
        (b"GeneratedTokens", ("TIMESTAMP", "ContextTokens")),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, header: bytes, missing: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError, match=missing[0]) as caught:
        read_trace(write(tmp_path, header, AZURE))
    assert caught.value.missing == missing


@pytest.mark.parametrize(
    "content", [b"time,prompt,output\n1,2,3\n", AZURE, b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"hello"]
)
def test_another_format_is_refused_and_both_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"timestamp.*ContextTokens"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        read_trace(tmp_path)


@pytest.mark.parametrize("max_model_len", [2, 3, 100, 9416, 131072])
def test_the_synthetic_hour_fits_and_repeats(max_model_len: int) -> None:
    trace, again, other = (synthetic(seed, max_model_len=max_model_len) for seed in (3, 3, 4))
    total = trace.input_length + trace.output_length
    assert total.max() <= max_model_len
    assert trace.input_length.min() >= 1
    assert trace.output_length.min() >= 1
    assert np.all(np.diff(trace.arrival) >= 0)
    assert (trace.arrival[0], trace.arrival[-1] <= 3600) == (0, True)
    for name in ("arrival", "input_length", "output_length", "line"):
        assert np.array_equal(getattr(trace, name), getattr(again, name))
    assert not np.array_equal(trace.arrival, other.arrival)


def test_the_synthetic_hour_has_bursts_and_a_long_tail() -> None:
    trace = synthetic(0, max_model_len=131072)
    per_minute = np.bincount((trace.arrival // 60).astype(int))
    assert per_minute.max() > 3 * np.median(per_minute)
    assert np.percentile(trace.input_length, 99) > 20 * np.median(trace.input_length)


@pytest.mark.parametrize(
    "arguments", [{"max_model_len": 1}, {"max_model_len": 8, "seconds": 0}, {"max_model_len": 8, "rate": -1.0}]
)
def test_impossible_traffic_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        synthetic(0, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="seed"):
        synthetic(-1, max_model_len=8)
    with pytest.raises(ArgumentError, match="keep 0 requests"):
        synthetic(0, max_model_len=8).first(0)


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output", "longest"),
    [
        ("mooncake-conversation.jsonl", 12031, 144_793_823, 4_122_048, 126_527),
        ("azure-conv-2023.csv", 19366, 22_361_870, 4_088_665, 14_089),
    ],
)
def test_the_public_traces(name: str, requests: int, prompt: int, output: int, longest: int) -> None:
    folder = os.environ.get("BLOCKTABLE_DATA")
    if folder is None or not (path := Path(folder) / "traces" / name).exists():
        pytest.skip(f"{name} is not under BLOCKTABLE_DATA/traces")
    trace = read_trace(path)
    assert (len(trace), int(trace.input_length.sum()), int(trace.output_length.sum())) == (requests, prompt, output)
    assert int((trace.input_length + trace.output_length).max()) == longest
    assert trace.bad_lines == ()
    assert 3500 < trace.arrival[-1] < 3600

"""Damaged traces: whatever the damage, a line is a request or a named bad line, and nothing else is raised."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.errors import ArgumentError
from blocktable.traces import MAX_TOKENS, read_trace

LINES = [b'{"timestamp": %d, "input_length": 7, "output_length": 3, "hash_ids": [1, 2]}' % (i * 37) for i in range(150)]
ROWS = [b"2023-11-16 18:%02d:46.6805900,%d,44" % (i % 60, i + 1) for i in range(150)]
FILES = [b"\n".join(LINES), b"\r\n".join([b"TIMESTAMP,ContextTokens,GeneratedTokens", *ROWS, b""])]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, int]:
    kind = draw(st.integers(0, 1))
    content = bytearray(FILES[kind])
    first = content.index(b"\n") + 1 if kind else 0
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(first, len(content)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip" if at < len(content):
                content[at] = draw(st.integers(0, 255))
            case "cut":
                del content[at : at + draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = draw(
                    st.sampled_from([b"\0", b"\n", b'"', b"\xff", b"-", b"9" * 30, b",", b"{", b"NaN"])
                )
            case "double":
                content[at:at] = content[at : at + 60]
    return bytes(content), kind


@settings(max_examples=200, deadline=None)
@given(damaged())
def test_every_line_is_a_request_or_a_named_bad_line(tmp_path_factory: object, file: tuple[bytes, int]) -> None:
    content, kind = file
    path = Path(tmp_path_factory.getbasetemp()) / "damaged"  # type: ignore[attr-defined]
    path.write_bytes(content)
    numbers = [i for i, line in enumerate(content.split(b"\n"), 1) if line.strip()][kind:]
    refused = None
    try:
        trace = read_trace(path)
    except ArgumentError as error:
        refused = error
    if refused is not None:
        assert refused.bad * 100 > refused.lines  # type: ignore[operator]
        assert refused.lines == len(numbers)
        return
    assert sorted([*trace.line.tolist(), *(line.number for line in trace.bad_lines)]) == numbers
    assert len(trace.bad_lines) * 100 <= len(numbers)
    assert 1 <= trace.input_length.min() <= trace.input_length.max() <= MAX_TOKENS
    assert 0 <= trace.output_length.min() <= trace.output_length.max() <= MAX_TOKENS
    assert (trace.arrival[0], bool((trace.arrival[1:] >= trace.arrival[:-1]).all())) == (0.0, True)
    assert trace.hash_indptr.size == len(trace) + 1


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300))
def test_noise_is_refused(tmp_path_factory: object, content: bytes) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "noise"  # type: ignore[attr-defined]
    path.write_bytes(content)
    try:
        read_trace(path)
    except ArgumentError:
        return
    raise AssertionError

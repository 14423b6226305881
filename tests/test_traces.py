"""Traces: both formats, and every kind of garbled line with its file, line and reason."""

from __future__ import annotations

import os
import pathlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_indexer.traces import MAX_TOKENS, Request, TraceError, read, scaled

GOOD = '{"timestamp": 1500, "input_length": 1300, "output_length": 7, "hash_ids": [4, 5, 6]}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROW = "2023-11-16 18:17:03.9799600,4808,10\r\n"


def _write(tmp_path: pathlib.Path, content: str | bytes, name: str = "trace") -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_mooncake(tmp_path):
    path = _write(tmp_path, GOOD + "\n" + '{"timestamp": 2000.5, "input_length": 1, "output_length": 0}')
    assert read(path) == [
        Request(1.5, 1300, 7, hash_ids=(4, 5, 6)),
        Request(2.0005, 1, 0),
    ]
    assert read(path, limit=1) == [Request(1.5, 1300, 7, hash_ids=(4, 5, 6))]
    assert read(tmp_path / "trace", limit=99) == read(path)


def test_azure(tmp_path):
    later = "2023-11-16 18:17:04.0319600,3180,8\r\n2023-11-17 00:00:00,1,0\r\n"
    assert read(_write(tmp_path, HEADER + ROW + later)) == [
        Request(0.0, 4808, 10),
        Request(0.052, 3180, 8),
        Request(20576.02004, 1, 0),
    ]


def test_azure_other_column_order_byte_order_mark_and_time_zone(tmp_path):
    text = (
        "\ufeffGeneratedTokens,Model,ContextTokens,TIMESTAMP\n"
        "2,a,10,2024-05-10 02:00:00.5+02:00\n"
        '3,"b,c",11,2024-05-10T00:00:01Z\n'
        "4,d,12,2024-05-09 23:30:00-00:30\n"
    )
    assert read(_write(tmp_path, text)) == [Request(0.5, 10, 2), Request(1.0, 11, 3), Request(0.0, 12, 4)]


BAD_MOONCAKE = [
    ('{"timestamp": 0, "input_length": 5', "not a JSON object"),
    ("[1, 2]", "expected a JSON object, got [1, 2]"),
    ("7", "expected a JSON object, got 7"),
    (HEADER, "not a JSON object"),
    ('{"input_length": 5, "output_length": 1}', "timestamp is missing"),
    ('{"timestamp": 0, "output_length": 1}', "input_length is missing"),
    ('{"timestamp": 0, "input_length": 5}', "output_length is missing"),
    ('{"timestamp": "0", "input_length": 5, "output_length": 1}', "timestamp must be milliseconds"),
    ('{"timestamp": true, "input_length": 5, "output_length": 1}', "timestamp must be milliseconds"),
    ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "timestamp must be milliseconds"),
    ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', "timestamp must be milliseconds"),
    ('{"timestamp": Infinity, "input_length": 5, "output_length": 1}', "timestamp must be milliseconds"),
    ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length must be an integer in 1.."),
    ('{"timestamp": 0, "input_length": 5.0, "output_length": 1}', "input_length must be an integer"),
    ('{"timestamp": 0, "input_length": "5", "output_length": 1}', "input_length must be an integer"),
    ('{"timestamp": 0, "input_length": null, "output_length": 1}', "got None"),
    ('{"timestamp": 0, "input_length": false, "output_length": 1}', "got False"),
    (f'{{"timestamp": 0, "input_length": {2**31}, "output_length": 1}}', f"got {2**31}"),
    ('{"timestamp": 0, "input_length": ' + "9" * 5000 + ', "output_length": 1}', "not a JSON object"),
    ('{"timestamp": 0, "input_length": 5, "output_length": -1}', "output_length must be an integer in 0.."),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 3}', "hash_ids must be a list"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, "2"]}', "hash_ids must be"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [true]}', "hash_ids must be"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "hash_ids must be"),
    ("[" * 100_000, "not a JSON object"),
]

BAD_AZURE = [
    ("2023-11-16 18:17:03.9,4808", "expected 3 fields (TIMESTAMP, ContextTokens, GeneratedTokens), got 2"),
    ("2023-11-16 18:17:03.9,4808,1,2", "expected 3 fields"),
    ('2023-11-16 18:17:03.9,"4808,1', "not a CSV line"),
    ("yesterday,4808,1", "TIMESTAMP must look like"),
    ("2023-13-16 18:17:03,4808,1", "TIMESTAMP must look like"),
    ("2023-11-16 25:17:03,4808,1", "TIMESTAMP must look like"),
    ("0001-01-01 00:00:00+09:00,4808,1", "TIMESTAMP must look like"),
    (",4808,1", "TIMESTAMP must look like"),
    ("2023-11-16 18:17:03,,1", "ContextTokens must be an integer in 1.."),
    ("2023-11-16 18:17:03,0,1", "ContextTokens must be an integer in 1.."),
    ("2023-11-16 18:17:03,1_000,1", "got '1_000'"),
    ("2023-11-16 18:17:03,1e3,1", "got '1e3'"),
    ("2023-11-16 18:17:03,\u0663,1", "ContextTokens must be an integer"),
    (f"2023-11-16 18:17:03,{2**31},1", f"got '{2**31}'"),
    ("2023-11-16 18:17:03," + "9" * 5000 + ",1", "ContextTokens must be an integer"),
    ("2023-11-16 18:17:03,5,-1", "GeneratedTokens must be an integer in 0.."),
    ("\x00", "got 1"),
    (GOOD, "expected 3 fields"),
]


def _refused(path: str, line: int, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(path)
    assert caught.value.line == line
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert str(caught.value) == f"{path}, line {line}: {caught.value.reason}"
    assert len(str(caught.value)) < len(path) + 300


@pytest.mark.parametrize(("line", "reason"), BAD_MOONCAKE)
def test_garbled_mooncake_line(tmp_path, line, reason):
    # The blank line counts: the number is the one an editor shows.
    _refused(_write(tmp_path, GOOD + "\n" + line + "\n" + GOOD), 3, reason)


@pytest.mark.parametrize(("line", "reason"), BAD_AZURE)
def test_garbled_azure_line(tmp_path, line, reason):
    reason = "" if line == "\x00" else reason  # Python 3.10's csv module refuses the byte itself
    _refused(_write(tmp_path, HEADER + ROW + "\n" + line + "\r\n" + ROW), 4, reason)


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", 1, "no request in the file"),
        (b"\n\n", 1, "no request in the file"),
        (HEADER.encode(), 1, "no request in the file"),
        (b"time,in,out\n1,2,3\n", 1, "neither a JSON object (Mooncake) nor a header"),
        (b"TIMESTAMP,ContextTokens\n", 1, "neither a JSON object (Mooncake) nor a header"),
        (b"\x1f\x8b\x08\x00", 1, "not UTF-8 text"),
        (GOOD.encode() + b"\xff\xfe\n", 2, "not UTF-8 text"),
    ],
)
def test_not_a_trace(tmp_path, content, line, reason):
    _refused(_write(tmp_path, content), line, reason)


def test_lines_after_the_limit_are_not_read(tmp_path):
    path = _write(tmp_path, GOOD + GOOD + "garbled")
    assert len(read(path, limit=2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read(path, limit=3)


@pytest.mark.parametrize("limit", [0, -1, 1.0, "3", True])
def test_bad_limit(tmp_path, limit):
    with pytest.raises(ValueError, match="limit must be an integer of 1 or more"):
        read(_write(tmp_path, GOOD), limit=limit)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"arrival_s": float("nan")}, "arrival_s"),
        ({"input_tokens": 0}, "input_tokens"),
        ({"input_tokens": MAX_TOKENS + 1}, "input_tokens"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"cached_tokens": 10}, "cached_tokens"),
        ({"cached_tokens": -1}, "cached_tokens"),
    ],
)
def test_request_refuses(change, name):
    with pytest.raises(ValueError, match=name):
        Request(**({"arrival_s": 0.0, "input_tokens": 10, "output_tokens": 1} | change))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, MAX_TOKENS), st.integers(0, MAX_TOKENS), st.integers(1, 10**6), st.data())
def test_scaled(tokens, output, scale, data):
    cached = data.draw(st.integers(0, tokens - 1))
    (small,) = scaled([Request(3.0, tokens, output, (1, 2), cached_tokens=cached)], scale)
    assert (small.input_tokens - 1) * scale < tokens <= small.input_tokens * scale
    assert small.output_tokens == (output + scale - 1) // scale
    assert 0 <= small.cached_tokens < small.input_tokens
    assert (small.arrival_s, small.hash_ids) == (3.0, (1, 2))


def test_scale_below_one():
    with pytest.raises(ValueError, match="scale must be 1 or more, got 0"):
        scaled([], 0)


def _shared(name: str) -> pathlib.Path:
    beside = pathlib.Path(__file__).parents[2] / "shared" / "traces"
    root = pathlib.Path(os.environ.get("PORTABLE_INDEXER_TRACES", beside))
    if not (root / name).is_file():
        pytest.skip(f"no {name} under {root} (PORTABLE_INDEXER_TRACES names another folder)")
    return root / name


def test_real_mooncake_trace():
    requests = read(_shared("mooncake_conversation_first3000.jsonl"))
    assert len(requests) == 3000
    assert requests[0].input_tokens == 6758
    assert requests[-1] == Request(987.0, 900, 50, hash_ids=(0, 55286))
    assert all(len(r.hash_ids) == -(-r.input_tokens // r.block_tokens) for r in requests)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))


def test_real_azure_trace():
    requests = read(_shared("azure_llm_code_first4000.csv"))
    assert len(requests) == 4000
    assert requests[:2] == [Request(0.0, 4808, 10), Request(0.052, 3180, 8)]
    assert requests[-1] == Request(1365.357816, 2454, 13)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))

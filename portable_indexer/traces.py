"""Request traces: lengths and arrival times of real requests, read from Mooncake JSONL or Azure CSV files."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

MAX_TOKENS = 2**31 - 1  # ids are int32
HASH_BLOCK_TOKENS = 512  # prompt tokens behind one Mooncake hash id

_DIGITS = re.compile(r"[0-9]{1,18}")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME = re.compile(
    r"(?P<second>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?P<fraction>\.\d{1,9})?"
    r"(?:Z|(?P<sign>[+-])(?P<hours>\d\d):(?P<minutes>\d\d))?",
    re.ASCII,
)


class TraceError(ValueError):
    """A line of a trace that cannot be read; `path`, `line` (from 1) and `reason` say where and why."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Request:
    """One request as a server sees it.

    arrival_s      seconds since the start of the trace
    input_tokens   tokens of the prompt, 1 or more
    output_tokens  tokens generated; the first one comes out of the last prefill chunk
    hash_ids       one id for each `block_tokens` of the prompt; equal leading ids mean an equal prefix
    block_tokens   prompt tokens behind one hash id
    cached_tokens  leading prompt tokens whose keys are stored already: they are never scheduled as rows

    Raises ValueError, naming the field, for values out of range.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASH_BLOCK_TOKENS
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s must be finite, got {self.arrival_s}")
        if not 1 <= self.input_tokens <= MAX_TOKENS:
            raise ValueError(f"input_tokens must be in 1..{MAX_TOKENS}, got {self.input_tokens}")
        if not 0 <= self.output_tokens <= MAX_TOKENS:
            raise ValueError(f"output_tokens must be in 0..{MAX_TOKENS}, got {self.output_tokens}")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be 1 or more, got {self.block_tokens}")
        if not 0 <= self.cached_tokens < self.input_tokens:
            raise ValueError(
                f"cached_tokens must be in 0..{self.input_tokens - 1} (one token of the prompt is always "
                f"computed), got {self.cached_tokens}"
            )


def read(path: str | os.PathLike[str], limit: int | None = None) -> list[Request]:
    """Reads the first `limit` requests (all of them by default) of a trace, in the order of the file.

    The format is told by the first line: a JSON object starts Mooncake JSONL (`timestamp` in ms,
    `input_length`, `output_length`, optionally `hash_ids`), a header with TIMESTAMP, ContextTokens and
    GeneratedTokens starts an Azure CSV, whose earliest request read gets arrival 0. Blank lines are skipped.

    Raises TraceError (a ValueError) for the first bad line, ValueError for a bad `limit` and OSError where
    the file cannot be opened.
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"limit must be an integer of 1 or more, or None, got {limit!r}")
    name = os.fspath(path)
    requests: list[Request] = []
    parse: Callable[[str], Request] | None = None
    line = 0
    for line, text in _lines(name):
        try:
            if parse is None:
                parse = _mooncake if text.startswith("{") else _azure_parser(text)
                if parse is not _mooncake:
                    continue
            requests.append(parse(text))
        except ValueError as error:
            raise TraceError(name, line, str(error)) from None
        if len(requests) == limit:
            break
    if not requests:
        raise TraceError(name, max(line, 1), "no request in the file")
    if parse is _mooncake:
        return requests
    start = min(request.arrival_s for request in requests)
    return [replace(request, arrival_s=round(request.arrival_s - start, 9)) for request in requests]


def scaled(requests: Sequence[Request], scale: int) -> list[Request]:
    """The same requests with every length divided by `scale` (1 or more), rounded up; arrivals stay.

    Hash blocks shrink with the prompt, so shared prefixes stay shared.
    """
    if scale < 1:
        raise ValueError(f"scale must be 1 or more, got {scale}")

    def one(request: Request) -> Request:
        return replace(
            request,
            input_tokens=-(-request.input_tokens // scale),
            output_tokens=-(-request.output_tokens // scale),
            block_tokens=max(1, request.block_tokens // scale),
            cached_tokens=request.cached_tokens // scale,
        )

    return [one(request) for request in requests]


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank and their numbers from 1; decoded singly, so that an error has a line."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise TraceError(path, number, f"not UTF-8 text ({error.reason})") from None
            if text:
                yield number, text


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _mooncake(text: str) -> Request:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON object: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {_clip(record)}")
    timestamp = _field(record, "timestamp")
    if not isinstance(timestamp, (int, float)) or isinstance(timestamp, bool) or not 0 <= timestamp < 2**53:
        raise ValueError(f"timestamp must be milliseconds, 0 or more, got {_clip(timestamp)}")
    hash_ids = record.get("hash_ids", [])
    if not isinstance(hash_ids, list) or any(type(i) is not int or i < 0 for i in hash_ids):
        raise ValueError(f"hash_ids must be a list of integers of 0 or more, got {_clip(hash_ids)}")
    return Request(
        arrival_s=timestamp / 1000,
        input_tokens=_json_count(record, "input_length", 1),
        output_tokens=_json_count(record, "output_length", 0),
        hash_ids=tuple(hash_ids),
    )


def _field(record: dict[str, object], name: str) -> object:
    if name not in record:
        raise ValueError(f"{name} is missing")
    return record[name]


def _json_count(record: dict[str, object], name: str, least: int) -> int:
    value = _field(record, name)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be an integer in {least}..{MAX_TOKENS}, got {_clip(value)}")
    return value


def _azure_parser(header: str) -> Callable[[str], Request]:
    names = [name.strip() for name in _csv_fields(header)]
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        raise ValueError(
            "neither a JSON object (Mooncake) nor a header with TIMESTAMP, ContextTokens and "
            f"GeneratedTokens (Azure): {_clip(header)}"
        )
    time, context, generated = (names.index(name) for name in _AZURE_COLUMNS)
    origin: datetime | None = None

    def parse(text: str) -> Request:
        fields = _csv_fields(text)
        if len(fields) != len(names):
            raise ValueError(f"expected {len(names)} fields ({', '.join(names)}), got {len(fields)}")
        second, fraction = _azure_time(fields[time].strip())
        nonlocal origin
        origin = origin or second
        return Request(
            # A difference first: seconds since 1970 would leave a float too few digits for the fraction.
            arrival_s=(second - origin).total_seconds() + fraction,
            input_tokens=_csv_count("ContextTokens", fields[context].strip(), 1),
            output_tokens=_csv_count("GeneratedTokens", fields[generated].strip(), 0),
        )

    return parse


def _csv_fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"not a CSV line: {error}") from None


def _csv_count(name: str, text: str, least: int) -> int:
    if not _DIGITS.fullmatch(text) or not least <= int(text) <= MAX_TOKENS:
        raise ValueError(f"{name} must be an integer in {least}..{MAX_TOKENS}, got {_clip(text)}")
    return int(text)


def _azure_time(text: str) -> tuple[datetime, float]:
    """The whole second, in UTC, and the fraction, which has more digits than datetime keeps."""
    match = _AZURE_TIME.fullmatch(text)
    problem = f"TIMESTAMP must look like 2023-11-16 18:17:03.9799600, got {_clip(text)}"
    if match is None:
        raise ValueError(problem)
    offset = timedelta(hours=int(match["hours"] or 0), minutes=int(match["minutes"] or 0))
    try:
        second = datetime.fromisoformat(match["second"]).replace(tzinfo=timezone.utc)
        second += offset if match["sign"] == "-" else -offset
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{problem} ({error})") from None
    return second, float(match["fraction"] or 0)

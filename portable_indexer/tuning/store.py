"""Tuning files: reading, checking and writing them whole."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = "PORTABLE_INDEXER_TUNING"
SCHEMA = 1
SOURCES = ("measured", "datasheet", "reported")
ALGORITHMS = ("grouped", "padded")

# Every number that a file must hold; True where it must be above zero, not only non-negative.
REQUIRED = {
    "launch_s": False,
    "score_start_s": False,
    "score_row_s": False,
    "score_pair_s": False,
    "score_flops": True,
    "select_start_s": False,
    "select_short_s": True,
    "select_long_s": False,
    "select_row_s": False,
    "select_pair_s": True,
}
# Numbers that a file may lack, where they are 0.
OPTIONAL = ("select_id_s",)
_EXCHANGE = re.compile(r"exchange\.([1-9]\d*)\.(latency_s|bandwidth|launch_s)")


class TuningError(ValueError):
    """A tuning file that cannot be used; the message names the file and the entry."""


def user_file(name: str) -> Path | None:
    """Where the user's file for a product or architecture lives, None where there is no home to look in."""
    explicit = os.environ.get(ENVIRONMENT, "").strip()
    if explicit:
        return Path(explicit)
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        base = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "portable_indexer" / f"{name}.json"


def read(text: str, where: str) -> Any:
    """Parse JSON text. Raises TuningError naming the place."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise TuningError(f"{where}: not JSON: {error}") from error


def check(content: Any, where: str) -> dict[str, Any]:
    """The content, if it is a whole tuning file (schema.json says the same for other tools).

    Raises:
        TuningError: naming the file, the entry, what stands there and what is accepted.
    """
    content = _mapping(content, where, "the file")
    if content.get("schema") != SCHEMA:
        raise TuningError(f"{where}: schema must be {SCHEMA}, got {content.get('schema')!r}")
    for name in ("product", "arch", "about"):
        if not isinstance(content.get(name), str) or not content[name]:
            raise TuningError(f"{where}: {name} must be a string, got {content.get(name)!r}")
    runs = _mapping(content.get("runs"), where, "runs")
    for key, run in runs.items():
        for name in ("date", "versions"):
            if name not in _mapping(run, where, f"runs.{key}"):
                raise TuningError(f"{where}: runs.{key} lacks {name}")
    numbers = _mapping(content.get("numbers"), where, "numbers")
    for name, entry in numbers.items():
        positive = REQUIRED.get(name)
        match = _EXCHANGE.fullmatch(name)
        if positive is None and match is None and name not in OPTIONAL:
            raise TuningError(f"{where}: unknown number {name}")
        _number(entry, where, f"numbers.{name}", runs, bool(positive) or name.endswith(".bandwidth"))
        if match and int(match[1]) < 2:
            raise TuningError(f"{where}: numbers.{name}: an exchange needs at least 2 ranks")
        for half in ("latency_s", "bandwidth"):
            if match and f"exchange.{match[1]}.{half}" not in numbers:
                raise TuningError(f"{where}: numbers.{name} lacks its other half exchange.{match[1]}.{half}")
    missing = [name for name in REQUIRED if name not in numbers]
    if missing:
        raise TuningError(f"{where}: numbers lacks {', '.join(missing)}")
    choices = _mapping(content.get("choices"), where, "choices")
    algorithm = _mapping(choices.get("exchange_algorithm"), where, "choices.exchange_algorithm")
    if algorithm.get("value") not in ALGORITHMS:
        raise TuningError(
            f"{where}: choices.exchange_algorithm must be one of {ALGORITHMS}, got {algorithm.get('value')!r}"
        )
    _source(algorithm, where, "choices.exchange_algorithm", runs)
    return dict(content)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Check `content` and put it at `path`: the whole file or, on any failure, what was there before.

    Raises:
        TuningError: if the content is not a tuning file.
        OSError: if the place cannot be written.
    """
    check(content, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _mapping(value: Any, where: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TuningError(f"{where}: {name} must be an object, got {type(value).__name__}")
    return value


def _number(entry: Any, where: str, name: str, runs: Mapping[str, Any], positive: bool) -> None:
    entry = _mapping(entry, where, name)
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TuningError(f"{where}: {name}.value must be a finite number, got {value!r}")
    if value < 0 or (positive and value == 0):
        raise TuningError(f"{where}: {name}.value must be {'above' if positive else 'at least'} 0, got {value!r}")
    _source(entry, where, name, runs)


def _source(entry: Mapping[str, Any], where: str, name: str, runs: Mapping[str, Any]) -> None:
    if entry.get("source") not in SOURCES:
        raise TuningError(f"{where}: {name}.source must be one of {SOURCES}, got {entry.get('source')!r}")
    if entry["source"] == "measured" and entry.get("run") not in runs:
        raise TuningError(
            f"{where}: {name} is measured, so its run must be one of {sorted(runs)}, got {entry.get('run')!r}"
        )

"""A progress bar on standard error: one line, redrawn, and silent where nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Bar:
    """`with Bar(total, "measuring") as bar: ... bar.advance("what was done")`.

    Draws only where standard error is a terminal.
    """

    def __init__(self, total: int, title: str, quiet: bool = False) -> None:
        self._total, self._title = max(total, 1), title
        self._done = 0
        self._live = not quiet and sys.stderr.isatty()
        self._start = time.monotonic()

    def advance(self, text: str = "", steps: int = 1) -> None:
        """Count `steps` more as done and show `text` beside the bar."""
        self._done += steps
        if not self._live:
            return
        share = min(self._done / self._total, 1.0)
        filled = round(24 * share)
        taken = time.monotonic() - self._start
        line = f"{self._title} [{'#' * filled}{'.' * (24 - filled)}] {share:4.0%} {taken:4.0f} s  {text}"
        sys.stderr.write(f"\r{line[:110]:110}")
        sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._done:
            sys.stderr.write("\n")

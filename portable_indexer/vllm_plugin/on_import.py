"""Callbacks for modules that are not imported yet.

Importing vLLM's model files early costs seconds and may re-enter vLLM's own plugin loader, so hooks wait. A
finder at the head of ``sys.meta_path`` lets the other finders do their work and wraps only the loader of a
module that somebody waits for.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_log = logging.getLogger(__name__)
_waiting: dict[str, list[Callback]] = {}
_lock = threading.RLock()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once: now, if the module is imported, else right after its import."""
    with _lock:
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            _waiting.setdefault(name, []).append(callback)
            if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
                sys.meta_path.insert(0, _Finder())
            return
    callback(module)


def forget(name: str) -> None:
    """Drop the callbacks that wait for a module."""
    with _lock:
        _waiting.pop(name, None)


def _imported(name: str, module: ModuleType) -> None:
    with _lock:
        callbacks = _waiting.pop(name, [])
    for callback in callbacks:
        try:
            callback(module)
        except Exception:  # An import of vLLM's must never fail because of this package.
            _log.exception("a callback for %s failed", name)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.name = None
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(Loader):
    """Another loader, with the callbacks run after the module's code."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader, self._name = loader, name

    def __getattr__(self, name: str) -> Any:
        # Whoever finds the module without importing it may ask its loader for source, code or resources.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module sees its own loader, as if nobody had waited for it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _imported(self._name, module)

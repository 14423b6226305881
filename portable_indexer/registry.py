"""Which backends exist, which can serve a problem, and why the others cannot."""

from __future__ import annotations

import logging
import os
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from portable_indexer.backend import Backend, Problem
    from portable_indexer.device import Device

ENTRY_POINT_GROUP = "portable_indexer.backends"
_BUILTIN = {
    "triton_rocm": "portable_indexer.backends.triton_rocm:TritonRocm",
    "triton_cuda": "portable_indexer.backends.triton_cuda:TritonCuda",
    "reference": "portable_indexer.backends.reference:Reference",
}
_PREFERRED = {"amd": ("triton_rocm",), "nvidia": ("triton_cuda",), "cpu": ("reference",)}

logger = logging.getLogger("portable_indexer")


@lru_cache(maxsize=1)
def _targets() -> dict[str, str]:
    """Backend names and where each is imported from; a built-in name cannot be taken by a plugin."""
    targets = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**targets, **_BUILTIN}


@cache
def _load(name: str) -> Backend:
    module, _, attribute = _targets()[name].partition(":")
    return cast("Backend", getattr(import_module(module), attribute)())


@cache
def _log_once(message: str) -> None:
    logger.warning(message)


def list_backends() -> list[str]:
    """Names of all backends, built in and registered, whether or not they can run here."""
    return sorted(_targets())


def why_not(name: str, device: Device, problem: Problem | None = None) -> str | None:
    """The reason why the named backend cannot serve the problem on the device; None where it can."""
    try:
        backend = _load(name)
    except Exception as error:  # a broken third-party backend is a reason, not a crash
        return f"cannot be imported: {type(error).__name__}: {error}"
    return backend.unsupported(device, problem)


def _explicit(name: str, device: Device, problem: Problem | None, source: str) -> Backend:
    if name not in _targets():
        raise ValueError(f"{source}: no backend is called {name!r}; there are: {', '.join(list_backends())}")
    reason = why_not(name, device, problem)
    if reason is not None:
        rest = "; ".join(
            f"{other}: {why_not(other, device, problem) or 'supported'}" for other in list_backends() if other != name
        )
        raise ValueError(f"{source}: backend {name!r} cannot serve this: {reason} ({rest})")
    return _load(name)


def resolve(device: Device, problem: Problem | None = None, name: str | None = None) -> Backend:
    """The backend for a problem on a device.

    A ``name``, or else PORTABLE_INDEXER_BACKEND, is binding: ValueError with the list and every
    reason where it is unknown or cannot serve. Without one, the device's own backend comes first,
    then registered ones, then the reference; each one passed over is logged once with its reason.
    """
    if name is not None:
        return _explicit(name, device, problem, "backend")
    chosen = os.environ.get("PORTABLE_INDEXER_BACKEND", "").strip()
    if chosen:
        return _explicit(chosen, device, problem, "PORTABLE_INDEXER_BACKEND")
    preferred = _PREFERRED.get(device.vendor, ())
    registered = tuple(sorted(set(_targets()) - set(_BUILTIN)))
    reasons: list[str] = []
    for candidate in dict.fromkeys((*preferred, *registered, "reference")):
        reason = why_not(candidate, device, problem)
        if reason is None:
            for message in reasons:
                _log_once(message)
            return _load(candidate)
        reasons.append(f"backend {candidate!r} passed over: {reason}")
    raise ValueError(f"no backend can serve this on {device.arch}: " + "; ".join(reasons))


def get_backend(name: str | None = None) -> Backend:
    """The named backend, or the one that ``resolve`` chooses for the current device.

    Raises ValueError with the list and the reasons where the name is unknown or cannot run here.
    """
    from portable_indexer.device import detect

    return resolve(detect(), None, name)

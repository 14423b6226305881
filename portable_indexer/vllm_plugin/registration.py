"""``register``, and what became of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from portable_indexer.vllm_plugin.hooks import Hook, install, log, states
from portable_indexer.vllm_plugin.settings import Settings

_registered = False


def register() -> None:
    """Install the hooks; called by vLLM in each of its processes. Never raises; a second call does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        settings = Settings.from_environment()
        if settings.mode == "off":
            log.info("portable_indexer: switched off by PORTABLE_INDEXER_VLLM")
            return
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:  # nothing, or a mere folder of that name
            log.warning("portable_indexer: vLLM is not installed; nothing to do")
            return
        for hook in _hooks():
            install(hook, settings)
    except Exception as error:  # vLLM must start, whatever is wrong here.
        log.error("portable_indexer: not active: %s: %s", type(error).__name__, error)


def state() -> dict[str, str]:
    """What each hook of this process is: "active: ...", "inactive: ..." with the reason, or "waiting for ..."."""
    return dict(states)


def status() -> dict[str, Any]:
    """The plugin as seen without starting vLLM, for ``portable-indexer doctor``.

    Returns:
        Keys ``vllm`` (installed version or None), ``entry_point`` (bool: would vLLM find the plugin),
        ``mode``, ``kernels`` (or ``error`` where a variable is wrong), and ``hooks`` (``state()``).
    """
    found: dict[str, Any] = {"vllm": _version("vllm"), "entry_point": False, "hooks": state()}
    for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
        found["entry_point"] |= point.value == "portable_indexer.vllm_plugin:register"
    try:
        settings = Settings.from_environment()
        found |= {"mode": settings.mode, "kernels": settings.kernels}
    except ValueError as error:
        found["error"] = str(error)
    return found


def _version(distribution: str) -> str | None:
    for name in (distribution, f"{distribution}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _hooks() -> tuple[Hook, ...]:
    from portable_indexer.vllm_plugin import cuda_op, kpool_op, plan, rocm_op, token_map

    return (plan.HOOK, rocm_op.HOOK, kpool_op.HOOK, cuda_op.HOOK, token_map.HOOK)

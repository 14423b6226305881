"""A hook: one change to one module of vLLM, applied on its own or not at all."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

from portable_indexer.vllm_plugin.on_import import when_imported
from portable_indexer.vllm_plugin.settings import Settings

# A child of vLLM's logger, so that its lines appear where vLLM's do.
log = logging.getLogger("vllm.portable_indexer")
_MARK = "__portable_indexer_original__"


class Inactive(Exception):
    """Why a hook does not apply; raised before anything was changed."""


class AlreadyApplied(Exception):
    """The hook was applied in this process before, and is still in place."""


@dataclass(frozen=True)
class Hook:
    """One change.

    Attributes:
        name: for the log and ``state``.
        module: the vLLM module that is changed; the hook waits for its import.
        apply: makes the change and returns what is active now, or raises Inactive. All checks come first.
    """

    name: str
    module: str
    apply: Callable[[ModuleType, Settings], str]


states: dict[str, str] = {}


def install(hook: Hook, settings: Settings) -> None:
    """Apply the hook as soon as its module is imported."""

    def run(module: ModuleType) -> None:
        level = logging.INFO if settings.mode == "auto" else logging.WARNING
        try:
            states[hook.name] = f"active: {hook.apply(module, settings)}"
            level = logging.INFO
        except AlreadyApplied:
            states[hook.name] = "active: applied in this process before"
            level = logging.INFO
        except Inactive as reason:
            states[hook.name] = f"inactive: {reason}"
        except Exception as error:  # One hook's fault must leave vLLM and the other hooks as they are.
            level = logging.WARNING
            states[hook.name] = f"inactive: unexpected {type(error).__name__}: {error}"
        log.log(level, "portable_indexer, %s: %s", hook.name, states[hook.name])

    states[hook.name] = f"waiting for {hook.module}"
    when_imported(hook.module, run)


def attribute(module: ModuleType, name: str) -> Any:
    """A name of a vLLM module, or Inactive."""
    try:
        return getattr(module, name)
    except AttributeError:
        raise Inactive(f"this vLLM has no {module.__name__}.{name}") from None


def require_fields(cls: Any, *names: str) -> None:
    """Inactive unless ``cls`` is a dataclass with these fields."""
    found = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    missing = [name for name in names if name not in found]
    if missing:
        raise Inactive(f"this vLLM's {getattr(cls, '__name__', cls)} has no field {', '.join(missing)}")


def parameters_of(function: Any, required: set[str], known: set[str]) -> inspect.Signature:
    """The signature, or Inactive where a required parameter is missing or one is unknown to this package."""
    signature = inspect.signature(function)
    names = set(signature.parameters)
    name = getattr(function, "__name__", repr(function))
    if not required <= names:
        raise Inactive(f"this vLLM's {name} has no parameter {', '.join(sorted(required - names))}")
    if not names <= known:
        raise Inactive(f"this vLLM's {name} has a new parameter: {', '.join(sorted(names - known))}")
    return signature


def names_in(function: Any) -> set[str]:
    """Every name that a function's code mentions, its decorators' wrappers and inner functions apart."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        raise Inactive(f"the code of {function!r} cannot be read")
    return {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}


def mark(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Remember what a replacement stands for."""
    setattr(replacement, _MARK, original)


def refuse_second(function: Any) -> None:
    """AlreadyApplied where the name is bound to a replacement of this package."""
    if hasattr(function, _MARK):
        raise AlreadyApplied


def rebind(old: object, new: object) -> list[str]:
    """Bind ``new`` wherever a module of vLLM has a global that is ``old``; returns the names.

    Names taken by ``from ... import`` before this ran are reached that way; later imports find the new one in
    the module that defines it.
    """
    changed = []
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] != "vllm":
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
                changed.append(f"{module_name}.{name}")
    return changed


def vendor(settings: Settings) -> str:
    """ "rocm" or "cuda", or Inactive. Under "on" every other platform is treated as ROCm."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        return "rocm"
    if current_platform.is_cuda():
        return "cuda"
    if settings.mode == "on":
        return "rocm"
    raise Inactive(f"the platform {type(current_platform).__name__} is neither ROCm nor CUDA")


def capturing() -> bool:
    """Whether the current stream records a graph. Initialises no GPU."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

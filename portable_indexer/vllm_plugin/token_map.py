"""The hook into vLLM's token-to-request map, ``compute_token_to_req_indices``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from portable_indexer.vllm_plugin.hooks import (
    Hook,
    attribute,
    capturing,
    log,
    mark,
    parameters_of,
    rebind,
    refuse_second,
    vendor,
)
from portable_indexer.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    import torch

MAP = "compute_token_to_req_indices"
_PARAMETERS = {"query_start_loc", "out", "num_mapped_tokens", "num_tokens"}


class TokenMap:
    """The map by this package's kernel, and by vLLM's where that may not run or fails."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._warm = False
        self._failed = False

    def __call__(
        self, query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
    ) -> torch.Tensor:
        # Inside a capture a kernel that was never launched would have to be compiled and loaded.
        if self._failed or (not self._warm and capturing()) or not _fits(query_start_loc, out):
            return self._original(query_start_loc, out, num_mapped_tokens, num_tokens)  # type: ignore[no-any-return]
        try:
            answer = _map(query_start_loc, out, num_mapped_tokens, num_tokens)
        except Exception as error:  # The original gives the same answer, and writes all of it again.
            if capturing():
                raise
            self._failed = True
            log.warning(
                "portable_indexer, request map: vLLM's is used from now on: %s: %s",
                type(error).__name__,
                error,
            )
            return self._original(query_start_loc, out, num_mapped_tokens, num_tokens)  # type: ignore[no-any-return]
        self._warm = True
        return answer


def _fits(query_start_loc: torch.Tensor, out: torch.Tensor) -> bool:
    import torch

    return (
        query_start_loc.dtype == torch.int32
        and out.dtype == torch.int32
        and query_start_loc.is_contiguous()
        and out.is_contiguous()
        and query_start_loc.shape[0] > 1
    )


def _map(query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int) -> torch.Tensor:
    """Tokens behind the last request's end belong to the last request, those behind the mapped ones to none (0)."""
    from portable_indexer.metadata import token_to_req_indices

    mapped = min(num_mapped_tokens, num_tokens)
    last = query_start_loc.shape[0] - 2
    token_to_req_indices(query_start_loc, mapped, out=out[:mapped], pad_value=last)
    if mapped < num_tokens:
        out[mapped:num_tokens].zero_()
    return out[:num_tokens]


def _apply(module: ModuleType, settings: Settings) -> str:
    platform = vendor(settings)
    original = attribute(module, MAP)
    refuse_second(original)
    parameters_of(original, _PARAMETERS, _PARAMETERS)
    token_map = TokenMap(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return token_map(*args, **kwargs)

    mark(replacement, original)
    rebind(original, replacement)
    return f"by this package's kernel ({platform})"


HOOK = Hook("request map", "vllm.v1.attention.ops.metadata", _apply)

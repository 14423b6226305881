"""The vLLM plugin: row sharding for vLLM's ROCm indexer, and the sharding policy and request map for all.

vLLM loads ``register`` from the entry-point group ``vllm.general_plugins`` in every process. It imports nothing
of vLLM by itself: each hook waits until vLLM has imported the module that it changes, checks what it finds
there, and either applies or says in one log line why it does not. A hook that does not apply leaves vLLM as it
is, and the other hooks alone.
"""

from __future__ import annotations

from portable_indexer.vllm_plugin.registration import register, state, status

__all__ = ["register", "state", "status"]

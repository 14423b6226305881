"""What the user asked of the plugin, read from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

MODE = "PORTABLE_INDEXER_VLLM"
KERNELS = "PORTABLE_INDEXER_VLLM_KERNELS"

Mode = Literal["off", "auto", "on"]
Kernels = Literal["vllm", "ours"]


@dataclass(frozen=True)
class Settings:
    """The plugin's switches.

    Attributes:
        mode: "off" changes nothing; "auto" applies hooks on ROCm and CUDA; "on" applies them on any platform
            (as on ROCm where it is neither), and warns about each that does not apply.
        kernels: who scores and selects prefill rows: "vllm" keeps vLLM's kernels, "ours" takes this package's.
    """

    mode: Mode = "auto"
    kernels: Kernels = "vllm"

    @classmethod
    def from_environment(cls) -> Settings:
        """Raises ValueError, naming the variable and the accepted values, for anything else."""
        mode = os.environ.get(MODE, "").strip().lower() or "auto"
        kernels = os.environ.get(KERNELS, "").strip().lower() or "vllm"
        for name, value, accepted in ((MODE, mode, get_args(Mode)), (KERNELS, kernels, get_args(Kernels))):
            if value not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
        return cls(mode, kernels)  # type: ignore[arg-type]

"""Launch choices on NVIDIA: frozen values from pure functions of architecture, Triton version, sizes and encodings."""

from __future__ import annotations

from functools import cache

from portable_indexer.backends.triton_common.scoring import ScoringChoice

# Architectures whose matrix units multiply e4m3fn; others multiply float16 instead.
NATIVE_FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
DESCRIPTOR_LOADS = ("sm_90", "sm_100", "sm_103", "sm_120")
# What the interpreter plays.
DEFAULT_ARCH = "sm_90"


@cache
def scoring_choice(
    arch: str, version: tuple[int, int], heads: int, dim: int, q_encoding: str, k_encoding: str
) -> ScoringChoice:
    """How ``fp8_mqa_logits`` is built.

    Args:
        arch: "sm_90", ...
        version: Triton's (major, minor).
        heads, dim: H and D.
        q_encoding, k_encoding: "fn" or "fnuz".
    """
    native = arch in NATIVE_FP8 and q_encoding == k_encoding == "fn"
    padded = max(4, 1 << (heads - 1).bit_length())
    columns = 256 if padded >= 64 else 128
    # One block leaves the products to the compiler's fusion, which takes one rounding tree in Triton 3.6 only.
    blocks = 1 if version < (3, 7) else 4
    return ScoringChoice(
        rows=columns // padded,
        keys=64 if columns == 256 else 128,
        heads=padded // blocks,
        blocks=blocks,
        relu="max",
        q_decode="fp8" if native else f"{q_encoding}_as_half",
        k_decode="fp8" if native else f"{k_encoding}_as_half",
        descriptor=native and arch in DESCRIPTOR_LOADS,
        stages=3,
        resident=3,
        options=(("num_warps", 4), ("num_stages", 3), ("enable_fp_fusion", blocks == 1)),
    )

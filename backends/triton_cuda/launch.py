"""Launch choices on NVIDIA: frozen values from pure functions of architecture, Triton version, sizes and encodings."""

from __future__ import annotations

from functools import cache

from portable_indexer.backends.triton_common.scoring import ScoringChoice
from portable_indexer.backends.triton_common.selection import SelectionChoice

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

    The accumulators of a warp give each quad of lanes eight columns, two to a lane: four rows can have their
    heads in one lane each. 128 columns leave room for four programs on an SM, which overlap each other's
    products and sums.

    Args:
        arch: "sm_90", ...
        version: Triton's (major, minor).
        heads, dim: H and D.
        q_encoding, k_encoding: "fn" or "fnuz".
    """
    native = arch in NATIVE_FP8 and q_encoding == k_encoding == "fn"
    padded = max(4, 1 << (heads - 1).bit_length())
    rows = 128 // padded
    lanes = min(rows, 4)
    options: list[tuple[str, int | bool]] = [("num_warps", 4), ("num_stages", 3), ("enable_fp_fusion", False)]
    if native and rows <= 8:
        options.append(("maxnreg", 128))
    return ScoringChoice(
        rows=rows,
        keys=64,
        heads=padded,
        blocks=1,
        lanes=lanes,
        pair=8 // lanes,
        relu="max",
        q_decode="fp8" if native else f"{q_encoding}_as_half",
        k_decode="fp8" if native else f"{k_encoding}_as_half",
        descriptor=native and arch in DESCRIPTOR_LOADS,
        direct=True,
        resident=4 if native and rows <= 8 else 2,
        options=tuple(options),
        relaxed=(("maxnreg", None),),
    )


@cache
def selection_choice(arch: str) -> SelectionChoice:
    """Tiles and warps of the selection kernels, which set the time of an answer and never the answer.

    Args:
        arch: "sm_90", ...
    """
    return SelectionChoice()

"""Launch choices on AMD: frozen values from pure functions of architecture, Triton version, sizes and encodings."""

from __future__ import annotations

from functools import cache

from portable_indexer.backends.triton_common.scoring import ScoringChoice
from portable_indexer.backends.triton_common.selection import SelectionChoice

# The e4m3 encoding that the matrix units multiply; other architectures multiply float16 instead.
NATIVE_FP8 = {"gfx940": "fnuz", "gfx941": "fnuz", "gfx942": "fnuz", "gfx950": "fn"}
# What the interpreter plays.
DEFAULT_ARCH = "gfx942"


def _decodes(arch: str, q_encoding: str, k_encoding: str) -> tuple[str, str]:
    native = NATIVE_FP8.get(arch)
    if native == "fnuz":
        reread = {"fnuz": "fp8", "fn": "fn_as_fnuz"}
        return reread[q_encoding], reread[k_encoding]
    if native == q_encoding == k_encoding:
        return "fp8", "fp8"
    return f"{q_encoding}_as_half", f"{k_encoding}_as_half"


@cache
def scoring_choice(
    arch: str, version: tuple[int, int], heads: int, dim: int, q_encoding: str, k_encoding: str
) -> ScoringChoice:
    """How ``fp8_mqa_logits`` is built.

    Four blocks of 32 row-heads, multiplied by 16 x 16 instructions: their register layout gives each quarter of
    a wave four consecutive columns, so four rows (or two, for 64 heads) can have their heads in one thread each.

    Args:
        arch: "gfx942", "gfx950", ...
        version: Triton's (major, minor).
        heads, dim: H and D.
        q_encoding, k_encoding: "fn" or "fnuz".
    """
    q_decode, k_decode = _decodes(arch, q_encoding, k_encoding)
    padded = max(4, 1 << (heads - 1).bit_length())
    # Queries stay in registers: with 256 channels there is room for half as many.
    rows = max(1, (128 if dim <= 128 else 64) // padded)
    lanes = min(rows, 4)
    # Triton 3.9 keeps more in registers on gfx950: two waves a SIMD would spill there.
    crowded = (arch == "gfx950" and version >= (3, 7)) or rows * padded * dim > 128 * 128
    crowded = crowded or (dim > 128 and k_decode != "fp8")
    # Few heads make many rows, with a scale and a bound each; float16 operands take twice the registers.
    crowded = crowded or padded <= 16 or k_decode.endswith("_as_half")
    waves = 1 if crowded else 2
    return ScoringChoice(
        rows=rows,
        keys=128,
        heads=padded // 4,
        blocks=4,
        lanes=lanes,
        pair=min(padded // 4, 16 // lanes),
        # gfx950 has a maximum that keeps NaN in one instruction.
        relu="max" if arch == "gfx950" else "sum_scalar",
        q_decode=q_decode,
        k_decode=k_decode,
        descriptor=False,
        direct=False,
        resident=waves,
        options=(
            ("num_warps", 4),
            ("num_stages", 2),
            ("matrix_instr_nonkdim", 16),
            ("waves_per_eu", 0 if waves == 1 else waves),
            ("enable_fp_fusion", False),
        ),
        relaxed=(("num_stages", 1), ("waves_per_eu", 0)),
    )


@cache
def selection_choice(arch: str) -> SelectionChoice:
    """Tiles and warps of the selection kernels, which set the time of an answer and never the answer.

    Args:
        arch: "gfx942", "gfx950", ...
    """
    return SelectionChoice(short_parts_per_warp=2, finish_warps=8)

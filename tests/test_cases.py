"""Faults met elsewhere that belong to no single operation here, and refusals of what this package does not do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from problems import make

import portable_indexer as pi

PACKAGE = Path(pi.__file__).parent
LEFT_OVER = 2**31 - 1


def test_an_id_buffer_of_tokens_heads_and_ids_is_refused() -> None:  # T30
    logits, bound = torch.zeros(3, 20), torch.zeros(3, dtype=torch.int32)
    for shape in ((3, 4, 16), (4, 3, 16)):
        out = torch.full(shape, LEFT_OVER, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"out must have 2 dimensions, got .*16"):
            pi.top_k_per_row(logits, bound, bound + 20, 16, out=out)
        assert (out == LEFT_OVER).all()


@pytest.mark.parametrize("keys", [0, 3, 40])
def test_no_id_of_the_last_user_of_a_buffer_is_left(keys: int, generator: torch.Generator) -> None:  # T17
    o = make(6, keys, 2, 32, generator, levels=1, ragged=True)
    out = torch.full((6, 16), LEFT_OVER, dtype=torch.int32)
    pi.index_topk(*o.args, 16, out=out)
    assert (out != LEFT_OVER).all() and (out < keys).all()
    assert torch.equal(out, pi.index_topk(*o.args, 16))


def test_lengths_by_request_and_row_are_refused() -> None:  # S34
    """A request has one length; the row's share of it follows from its place, so [B, n] is not read as [B]."""
    builder = pi.IndexerMetadataBuilder(8, 4, 40, next_n=2, device="cpu")
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    host = {"query_start_loc_cpu": [0, 2, 4], "seq_lens_cpu": [6, 10], "num_decodes": 2}
    by_row = torch.tensor([[5, 6], [9, 10]], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_lens must have 1 dimension"):
        builder.build(starts, by_row, **host)
    built = builder.build(starts, by_row[:, 1].contiguous(), **host)
    assert torch.equal(built.decode_row_keys_by_request, by_row)


def test_scratch_is_sized_in_the_keys_unit() -> None:  # M03, M04
    """A million tokens in pools of 4 are 262,144 keys: a decode step then needs a quarter of the logits."""
    tokens = pi.workspace_bytes(64, 1 << 20, 2048, 64, 128, 1)
    pools = pi.workspace_bytes(64, 1 << 18, 512, 64, 128, 1)
    assert 64 * 4 << 18 <= pools < tokens / 3


def test_no_launch_option_of_one_vendor_alone() -> None:  # S41
    """Triton's launchers refuse keywords that they do not know, whatever the value."""
    from portable_indexer.backends.triton_common.scoring import Variant
    from portable_indexer.backends.triton_cuda import launch as cuda
    from portable_indexer.backends.triton_rocm import launch as rocm

    common = {"num_warps", "num_stages", "num_ctas", "enable_fp_fusion"}
    amd = {"waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint", "instruction_sched_variant"}
    for launch, arch, allowed in (
        (rocm, "gfx942", common | amd), (rocm, "gfx950", common | amd), (cuda, "sm_90", common | {"maxnreg"}),
    ):  # fmt: skip
        for version in ((3, 6), (3, 9)):
            for heads, q, k in ((6, "fn", "fn"), (64, "fn", "fn"), (64, "fnuz", "fn"), (64, "fnuz", "fnuz")):
                choice = launch.scoring_choice(arch, version, heads, 128, q, k)
                for aligned in (False, True):
                    options = choice.launch_options(Variant(aligned, False))
                    assert set(options) <= allowed, (arch, version, options)


def test_nothing_compiled_is_shipped() -> None:  # K11
    """A binary for one architecture would not run on the next: kernels are compiled where they run."""
    files = [path for path in (*PACKAGE.rglob("*"), *(PACKAGE / "backends").resolve().rglob("*")) if path.is_file()]
    kinds = {path.suffix for path in files if "__pycache__" not in path.parts}
    assert len(files) > 50 and kinds <= {".py", ".json", ".typed", ".html", ".css", ".js", ".md"}, kinds

"""Scratch memory: views, sizes, the persistent one."""

from __future__ import annotations

import pytest
import torch

import portable_indexer as pi
from portable_indexer import workspace
from portable_indexer.workspace import logits_budget, persistent_workspace, spec_bytes


def test_views_stand_side_by_side() -> None:
    specs = ((3, 5), torch.float32), ((7,), torch.int32), ((1, 2, 3), torch.int64)
    scratch = pi.Workspace("cpu", spec_bytes(*specs))
    views = scratch.views(*specs)
    for number, (view, (shape, dtype)) in enumerate(zip(views, specs, strict=True)):
        assert view.shape == shape and view.dtype == dtype and view.is_contiguous()
        view.fill_(number)
    assert all((view == number).all() for number, view in enumerate(views))
    assert {view.data_ptr() % 256 for view in views} == {0}
    assert scratch.views(*specs)[2].data_ptr() == views[2].data_ptr()


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 1000, 1 << 20])
def test_any_size_is_aligned_and_whole(nbytes: int) -> None:
    scratch = pi.Workspace("cpu", nbytes)
    assert nbytes <= scratch.nbytes < nbytes + 256
    (view,) = scratch.views(((scratch.nbytes,), torch.uint8))
    assert view.data_ptr() % 256 == 0
    view.fill_(1)
    with pytest.raises(ValueError, match="too small"):
        scratch.views(((scratch.nbytes + 1,), torch.uint8))


def test_memory_made_under_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        scratch = pi.Workspace("cpu", 512)
        builder = pi.IndexerMetadataBuilder(8, 2, 20, device="cpu", backend="reference")
    scratch.views(((8,), torch.int32))[0].fill_(5)
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            built = builder.build(starts, lens, query_start_loc_cpu=[0, 3], seq_lens_cpu=[9])
            assert built.row_keys.tolist() == [7, 8, 9]


def test_too_small_names_both_sizes() -> None:
    scratch = pi.Workspace("cpu", 1000)
    with pytest.raises(ValueError, match="of 1024 bytes is too small: this call needs 1280"):
        scratch.views(((300,), torch.float32))


@pytest.mark.parametrize("bad", [-1, 1.5, True, "8"])
def test_bad_sizes(bad: object) -> None:
    with pytest.raises((ValueError, TypeError), match="nbytes"):
        pi.Workspace("cpu", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_bad_budget(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_LOGITS_MB", text)
    with pytest.raises(ValueError, match=f"PORTABLE_INDEXER_LOGITS_MB .* got '{text}'"):
        logits_budget()


def test_persistent_grows_once() -> None:  # X05, M12, V13
    device = torch.device("cpu")
    first = persistent_workspace(device, 5000)
    assert persistent_workspace(device, 100) is first
    address = first.views(((1,), torch.uint8))[0].data_ptr()
    second = persistent_workspace(device, first.nbytes + 1)
    assert second.nbytes >= first.nbytes * 3 // 2
    # T24: a graph captured with the first one may still be replayed.
    assert any(old.nbytes and old.views(((1,), torch.uint8))[0].data_ptr() == address for old in workspace._outgrown)
    assert second is not first and persistent_workspace(device, 5000) is second


def test_reported_bytes_are_enough_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:  # M01, M05, M11
    monkeypatch.setenv("PORTABLE_INDEXER_BACKEND", "reference")
    shape = {"topk": 2048, "num_heads": 64, "head_dim": 128}
    assert pi.workspace_bytes(8192, 300_000, tp_size=1, **shape) == 512 << 20
    alone = pi.workspace_bytes(100, 10, tp_size=1, **shape)
    assert 4 * 100 * 10 <= alone < 8192
    exchange = pi.workspace_bytes(65_536, 10, tp_size=8, width=2176, **shape)
    assert exchange >= 65_536 * 2048 * 4
    monkeypatch.setenv("PORTABLE_INDEXER_LOGITS_MB", "64")
    assert pi.workspace_bytes(8192, 300_000, tp_size=1, **shape) == 64 << 20


@pytest.mark.parametrize("change", [{"max_rows": -1}, {"topk": 0}, {"tp_size": 0}, {"width": 3}, {"max_keys": 1.5}])
def test_bad_arguments_are_named(change: dict[str, object]) -> None:
    arguments = {
        "max_rows": 8,
        "max_keys": 8,
        "topk": 4,
        "num_heads": 1,
        "head_dim": 32,
        "tp_size": 1,
        **change,
    }
    with pytest.raises((ValueError, TypeError), match=next(iter(change)).replace("max_", "max_")):
        pi.workspace_bytes(**arguments)  # type: ignore[arg-type]

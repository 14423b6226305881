"""vLLM's ROCm indexer op with the plugin, through ``torch.ops.vllm``, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import steps
import torch

STOCK = {"PORTABLE_INDEXER_VLLM": "off"}
THEIRS = {"PORTABLE_INDEXER_VLLM": "on", "PORTABLE_INDEXER_SHARD": "on"}
OURS = THEIRS | {"PORTABLE_INDEXER_VLLM_KERNELS": "ours"}
EVERY = pytest.mark.parametrize("name", list(steps.SCENARIOS))
# The stock op writes the ids of padded decode rows over prefill rows: it is no measure there.
OVERWRITTEN = {name for name in steps.SCENARIOS if name.startswith("zero-length")}


def sets(ids: torch.Tensor) -> torch.Tensor:
    return ids.sort(dim=1).values


def prefill(result: dict[str, Any]) -> torch.Tensor:
    width = result["oracle"].shape[1]
    return result["ids"][result["decode"] : result["rows"], :width]


def wanted(result: dict[str, Any]) -> torch.Tensor:
    return result["oracle"][result["decode"] :]


def outside(result: dict[str, Any]) -> list[torch.Tensor]:
    """All of the id buffer that no prefill row owns: decode rows, padded and unused rows, columns behind the top-k."""
    ids, width = result["ids"], result["oracle"].shape[1]
    return [ids[: result["decode"]], ids[result["rows"] :], ids[result["decode"] : result["rows"], width:]]


@EVERY
def test_two_ranks_with_our_kernels_give_the_oracles_bytes(job: Any, name: str) -> None:
    # P01 P02 P03 P14 S11 S13
    one = job("scenarios", 1, **OURS)[0]["results"][name]
    ranks = [entry["results"][name] for entry in job("scenarios", 2, **OURS)]
    for result in (one, *ranks):
        assert torch.equal(prefill(result), wanted(result))
        assert torch.equal(result["ids"], one["ids"])
    if one["decode"] < one["rows"]:
        assert one["sizes"] is None
        assert all(sum(result["sizes"]) == one["rows"] - one["decode"] for result in ranks)


@EVERY
def test_two_ranks_with_vllms_kernels_give_the_stock_ops_bytes(job: Any, name: str) -> None:
    stock = job("scenarios", 1, **STOCK)[0]["results"][name]
    for entry in job("scenarios", 2, **THEIRS):
        result = entry["results"][name]
        if name in OVERWRITTEN:
            assert torch.equal(result["ids"][: result["decode"]], stock["ids"][: result["decode"]])
        else:
            assert torch.equal(result["ids"], stock["ids"])
        if stock["decode"] < stock["rows"]:
            assert len(result["sizes"]) == 2 and min(result["sizes"]) > 0  # so it was not the stock path


@pytest.mark.parametrize("name", [name for name in steps.SCENARIOS if steps.SCENARIOS[name].exact])
def test_exact_and_separated_scores_give_one_set(job: Any, name: str) -> None:
    """Stock, sharded with vLLM's kernels, sharded with ours: the same ids where rounding cannot matter."""
    stock = job("scenarios", 1, **STOCK)[0]["results"][name]
    theirs = job("scenarios", 2, **THEIRS)[1]["results"][name]
    ours = job("scenarios", 2, **OURS)[1]["results"][name]
    assert torch.equal(sets(prefill(theirs)), sets(wanted(theirs)))
    assert torch.equal(sets(prefill(ours)), sets(wanted(ours)))
    assert torch.equal(sets(prefill(stock)), sets(wanted(stock))) == (name not in OVERWRITTEN)


@pytest.mark.parametrize("settings", [THEIRS, OURS], ids=["vllm", "ours"])
@EVERY
def test_decode_padding_cache_and_metadata_are_vllms(job: Any, name: str, settings: dict[str, str]) -> None:
    stock = job("scenarios", 1, **STOCK)[0]["results"][name]
    for entry in job("scenarios", 2, **settings):
        result = entry["results"][name]
        assert result["unchanged"]
        assert torch.equal(result["cache"], stock["cache"])
        for found, kept in zip(outside(result), outside(stock), strict=True):
            assert torch.equal(found, kept)


def test_sub_chunks_reuse_what_was_gathered(job: Any) -> None:
    result = job("scenarios", 2, **OURS)[0]["results"]["sub-chunks"]
    assert result["skips"].count(True) >= 5 and result["skips"].count(False) == 2


@pytest.mark.parametrize("settings", [THEIRS, OURS], ids=["vllm", "ours"])
def test_the_needle_at_the_start_stays_selected(job: Any, settings: dict[str, str]) -> None:
    # S10
    for entry in job("needles", 2, **settings):
        for name, result in entry["results"].items():
            assert result["sizes"] is not None, name
            assert (result["ids"] == result["needle"]).any(dim=1).all(), name
            if settings is OURS:
                assert torch.equal(result["ids"], result["oracle"]), name


def test_each_process_is_hooked_by_vllms_plugin_loader(job: Any) -> None:
    # V01
    for settings in (THEIRS, OURS):
        for entry in job("scenarios", 2, **settings):
            assert entry["state"]["ROCm indexer op"].startswith("active"), entry["state"]
            assert entry["state"]["row plan"].startswith("active"), entry["state"]
    assert job("scenarios", 1, **STOCK)[0]["state"] == {}

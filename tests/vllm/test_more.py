"""Empty shards, graphs, compilation, profiling, plans, replicas, faults, and the CUDA op, in real vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rocm_op import OURS, STOCK, THEIRS


@pytest.fixture(scope="module", params=[THEIRS, OURS], ids=["vllm", "ours"])
def extras(job: Any, request: pytest.FixtureRequest) -> tuple[bool, list[dict[str, Any]]]:
    return request.param is OURS, [entry["results"] for entry in job("extras", 2, **request.param)]


def test_a_rank_without_rows_takes_part(job: Any) -> None:
    # P03
    for entry in job("extras", 2, **OURS):
        for ids, oracle in entry["results"]["empty shards"].values():
            assert torch.equal(ids, oracle)


def test_a_full_graph_gets_the_original_and_no_collective(job: Any, extras: Any) -> None:
    # X09 V11
    stock = job("scenarios", 1, **STOCK)[0]["results"]["exact"]["ids"]
    for results in extras[1]:
        assert torch.equal(results["full graph"], stock)


def test_nothing_of_an_earlier_forward_is_left(job: Any) -> None:
    # V16
    for entry in job("extras", 2, **OURS):
        for ids, oracle in entry["results"]["two forwards"]:
            assert torch.equal(ids, oracle)


def test_inside_torch_compile(extras: Any) -> None:
    # V06
    ours, ranks = extras
    for results in ranks:
        ids, oracle, graphs = results["compiled"]
        assert graphs == 1
        assert torch.equal(ids, oracle) if ours else torch.equal(ids.sort(1).values, oracle.sort(1).values)


def test_the_profiling_run_reserves_all_that_a_step_needs(extras: Any) -> None:
    # M07 M11
    ours, ranks = extras
    for results in ranks:
        found = results["profiling run"]
        assert found["untouched"] and found["kept"]
        assert len(found["bytes"]) == 1 and found["bytes"][0] >= 512 * 32 * 4
        assert (found["behind"] == -1).all()
        if ours:
            assert torch.equal(found["ids"], found["oracle"])


def test_the_request_map_is_vllms(extras: Any) -> None:
    for results in extras[1]:
        for name, found, wanted in results["request map"]:
            assert torch.equal(found, wanted), name


def test_who_plans_shards(extras: Any) -> None:
    # X13: two ranks because the tensor-parallel group has two
    for results in extras[1]:
        plans = results["plans"]
        assert len(plans["default"]) == 2 and sum(plans["default"]) == 133
        assert plans["full graphs"] is None
        assert not plans["dcp"] and not plans["pcp"] and not plans["one rank"]
        assert results["candidates"]


def test_callers_of_the_python_function_are_reached(extras: Any) -> None:
    found = {results["a caller of the function"] for results in extras[1]}
    if found == {None}:
        pytest.skip("this vLLM has no layer that calls the op's function")
    assert found == {True}


def test_registered_twice(extras: Any) -> None:
    # V01
    for results in extras[1]:
        found = results["twice"]
        assert found["same"] and found["before"] == found["after"]
        assert found["forgotten"]["ROCm indexer op"] == "active: applied in this process before"


def test_the_cuda_op_with_our_kernels(job: Any) -> None:
    for entry in job("cuda_op", 2, **OURS):
        assert entry["state"]["CUDA indexer op"].startswith("active")
        for name, result in entry["results"].items():
            assert len(result["sizes"]) == 2, name
            assert torch.equal(result["ids"], result["oracle"]), name


@pytest.mark.parametrize(("tp", "settings"), [(2, THEIRS), (1, OURS), (2, OURS)], ids=["vllm", "ours 1", "ours 2"])
def test_glms_pooled_op_on_amd(job: Any, tp: int, settings: dict[str, str]) -> None:
    for entry in job("kpool", tp, **settings):
        assert entry["state"]["GLM k-pool op (AMD)"].startswith("active"), entry["state"]
        for name, result in entry["results"].items():
            stock, found = result["stock"], result["found"]
            rows, width = slice(result["decode"], result["rows"]), result["oracle"].shape[1]
            assert (result["sizes"] is None) if tp == 1 else (len(result["sizes"]) == 2), name
            assert (stock[: result["rows"], :32] != 12345).all()
            if settings is THEIRS or result["short"]:
                assert torch.equal(found, stock), name
                continue
            assert torch.equal(found[rows, :width], result["oracle"][rows]), name
            # Decode, padded and unused rows, and columns behind the ids, are vLLM's.
            assert torch.equal(found[: rows.start], stock[: rows.start]), name
            assert torch.equal(found[rows.stop :], stock[rows.stop :]), name
            assert torch.equal(found[rows, width:], stock[rows, width:]), name
            if result["exact"]:
                assert torch.equal(found.sort(dim=1).values, stock.sort(dim=1).values), name


def test_replicas_do_not_mix(job: Any) -> None:
    # X13: four processes, two replicas of two tensor-parallel ranks
    for entry in job("groups", 2, ranks=4, **OURS):
        for name, (ids, oracle) in entry["results"].items():
            assert torch.equal(ids, oracle), name


def test_one_ranks_failure_reaches_all(job: Any) -> None:
    # X04 X20
    ranks = job("failing_rank", 2, **OURS, PORTABLE_INDEXER_CHECK="1")
    for name in ("index_topk", "scratch"):
        assert ranks[1]["results"]["errors"][name] == "RuntimeError: this rank fails"
        error = ranks[0]["results"]["errors"][name]
        assert error.startswith("ExchangeError") and "rank 1 failed" in error
    for entry in ranks:
        ids, oracle = entry["results"]["afterwards"]
        assert torch.equal(ids, oracle)


def test_ranks_with_other_kernels_do_not_shard(job: Any) -> None:
    for entry in job("unlike", 2, **OURS, PORTABLE_INDEXER_TEST_RANK_1="vllm"):
        results = entry["results"]
        assert results["sizes"] is None
        assert torch.equal(results["ids"].sort(1).values, results["oracle"].sort(1).values)
        assert "set up alike" in entry["log"] and "on rank 1" in entry["log"]


@pytest.mark.parametrize(("least", "shards"), [(133, True), (134, False)])
def test_the_users_own_threshold_counts(job: Any, least: int, shards: bool) -> None:
    for entry in job("user_rows", 2, PORTABLE_INDEXER_VLLM="on", PORTABLE_INDEXER_TEST_MIN_ROWS=str(least)):
        results = entry["results"]
        if "skipped" in results:
            pytest.skip(results["skipped"])
        assert (results["sizes"] is not None) == shards

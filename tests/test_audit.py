"""The audit of machine code: a kernel that breaks a limit is named, with the choice and both numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).resolve().parents[1] / "ci"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the scripts import each other
    spec.loader.exec_module(module)
    return module


machine_code = load("machine_code")
compile_matrix = load("compile_matrix")
AUDIT = json.loads((CI / "audit.json").read_text())


def row(**change: Any) -> dict[str, Any]:
    good = {
        "triton": "3.9.0",
        "arch": "gfx942",
        "kernel": "mqa_logits_kernel",
        "choice": "H=64 D=128 Q_DECODE=fp8 K_DECODE=fp8 ALIGNED=True",
        "types": "*fp32,*i32",
        "matrix_ops": ["v_mfma_f32_16x16x32_fp8_fp8"],
        "matrix_cycles": 1024,
        "vector_cycles": 512,
        "vgpr": 240,
        "spills": 0,
        "sgpr_spills": 0,
        "scratch": 0,
        "lds": 17408,
        "whole_buffer": [],
    }
    return {**good, **change}


def faults(given: dict[str, Any], recorded: dict[str, Any] | None = None) -> list[str]:
    return list(compile_matrix.judge(given, AUDIT["limits"], recorded or {}))


def test_a_good_kernel_has_no_fault() -> None:
    assert faults(row()) == []


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"spills": 3}, "spills 3, limit 0"),
        ({"scratch": 64}, "scratch 64, limit 0"),
        ({"lds": 98_304}, "lds 98304, limit 65536"),  # S23
        ({"vector_cycles": 1000}, "vector / matrix cycles 0.98, limit 0.85"),
        ({"matrix_ops": ["v_mfma_f32_16x16x16_f16"]}, "matrix instructions ['v_mfma_f32_16x16x16_f16'], must be of"),
        ({"whole_buffer": ["out_ptr"]}, "out_ptr may exceed 2 GiB"),  # S24, S25
    ],
)
def test_a_broken_limit_is_named(change: dict[str, Any], both: str) -> None:
    (found,) = faults(row(**change))
    assert both in found and "gfx942, Triton 3.9, mqa_logits_kernel H=64 D=128" in found


def test_lds_that_only_the_larger_architecture_has() -> None:  # S23
    assert faults(row(arch="gfx950", lds=98_304)) == []
    assert faults(row(arch="gfx950", lds=163_841)) != []


def test_a_count_that_grew_is_a_regression() -> None:
    given = row(vgpr=241)
    before = {"gfx942 3.9": {compile_matrix.variant(given): {"vgpr": 240, "lds": 17408}}}
    (found,) = faults(given, before)
    assert "vgpr 241, recorded 240" in found
    assert faults(row(vgpr=239), before) == []


def test_recorded_counts_cover_the_audited_targets() -> None:
    targets = json.loads((CI / "matrix.json").read_text())["compile"]["targets"]
    places = {
        f"{arch} {version}" for arch, target in targets.items() if target["audit"] for version in target["triton"]
    }
    assert places == set(AUDIT["recorded"])
    for place, variants in AUDIT["recorded"].items():
        kernels = {name.split()[0] for name in variants}
        assert {"mqa_logits_kernel", "select_short", "choose_candidates", "_step_kernel"} <= kernels, place


def test_main_loop_is_the_inner_one() -> None:
    """A branch back over the whole kernel, epilogue included, is not the loop that matters."""
    text = """
.LBB0_1:
	v_mov_b32_e32 v0, v1
.LBB0_2:                                ; the loop
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], a[0:3]
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[0:1]
	ds_read_b128 v[0:3], v9
	s_barrier
	buffer_load_dwordx4 v[0:3], v1, s[0:3], 0 offen
	s_cbranch_scc1 .LBB0_2
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], a[0:3]
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], a[0:3]
	s_branch .LBB0_1
"""
    found = machine_code.loop_cycles(text, "gfx942")
    assert found["matrix_cycles"] == 2 * 16 * 16 * 32 // 1024
    assert found["vector_cycles"] == 4
    assert (found["lds_instructions"], found["barriers"], found["memory_instructions"]) == (1, 1, 1)


def test_arguments_addressed_whole_are_found() -> None:
    ttgir = """
  tt.func public @kernel(%out_ptr: !tt.ptr<f32> loc("o"), %ks_ptr: !tt.ptr<i32>, %M: i64) {
    %base = tt.addptr %out_ptr, %row : !tt.ptr<f32>, i64
    %a = amdg.buffer_load %ks_ptr[%lane], %mask : !tt.ptr<i32>
    amdg.buffer_store %x, %base[%offset], %mask : !tt.ptr<f32>
"""
    assert machine_code.whole_buffer_access(ttgir) == ["ks_ptr"]
    assert machine_code.whole_buffer_access(ttgir.replace("%base[", "%out_ptr[")) == ["ks_ptr", "out_ptr"]

"""The plugin's registration: what it hooks, what it refuses to hook and why, and that it never stands in the way."""

from __future__ import annotations

import dataclasses
import gc
import logging
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import fake_vllm
import pytest
import torch

from portable_indexer.vllm_plugin import hooks, on_import, register, state, status
from portable_indexer.vllm_plugin.rocm_op import replace_in_dispatcher
from portable_indexer.vllm_plugin.settings import Settings

GATE, PLAN = "tp_prefill_row_sharding_supported", "balanced_prefill_row_shard"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_vllm.World]:
    yield fake_vllm.install(monkeypatch)
    hooks.states.clear()


def original(function: Any) -> bool:
    return not hasattr(function, "__portable_indexer_original__")


def test_importing_it_needs_neither_vllm_nor_torch() -> None:
    # V03
    code = """
        import sys
        import portable_indexer.vllm_plugin as plugin
        assert not {"vllm", "torch", "triton"} & set(sys.modules), set(sys.modules)
        plugin.register()
        assert not {"vllm", "torch", "triton"} & set(sys.modules), "registering imports vLLM only where it hooks"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("portable_indexer.vllm_plugin.registration._registered", False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "vllm.portable_indexer"):
        register()
    assert "vLLM is not installed" in caplog.text


def test_every_name_is_reached(world: fake_vllm.World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.portable_indexer"):
        register()
    found = state()
    active = {name for name, text in found.items() if text.startswith("active")}
    assert active == {"row plan", "ROCm indexer op", "GLM k-pool op (AMD)", "request map"}
    assert len([r for r in caplog.records if r.name == "vllm.portable_indexer"]) == len(active)
    for module, name in (
        (fake_vllm.INDEXER, GATE),
        (fake_vllm.INDEXER, PLAN),
        (fake_vllm.ROCM, fake_vllm.OP),
        (fake_vllm.OPS, fake_vllm.OP),
        ("vllm.models.deepseek_v41", fake_vllm.OP),  # a caller of the Python function
        (fake_vllm.KPOOL, "sparse_attn_indexer_kpool"),
        (fake_vllm.MAP, "compute_token_to_req_indices"),
        ("vllm.v1.attention.backends.mla.sparse_swa", "compute_token_to_req_indices"),  # imported by name
    ):
        assert not original(getattr(world.modules[module], name)), (module, name)
    assert world.dispatched[fake_vllm.OP] is getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP)
    assert world.dispatched[fake_vllm.OP].breaks, "decorated as the original is"


def test_again_changes_nothing(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    # V01
    register()
    before = {name: dict(vars(module)) for name, module in world.modules.items()}
    register()
    monkeypatch.setattr("portable_indexer.vllm_plugin.registration._registered", False)
    register()
    assert {name: dict(vars(module)) for name, module in world.modules.items()} == before
    assert state()["ROCm indexer op"] == "active: applied in this process before"


@pytest.mark.parametrize("value", ["off", "OFF ", "nonsense"])
def test_off_or_wrong_leaves_vllm_alone(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_VLLM", value)
    before = {name: dict(vars(module)) for name, module in world.modules.items()}
    with caplog.at_level(logging.INFO, "vllm.portable_indexer"):
        register()
    assert {name: dict(vars(module)) for name, module in world.modules.items()} == before
    assert state() == {} and "PORTABLE_INDEXER_VLLM" in caplog.text


def test_a_wrong_kernel_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_INDEXER_VLLM_KERNELS", "theirs")
    with pytest.raises(ValueError, match="PORTABLE_INDEXER_VLLM_KERNELS must be one of vllm, ours, got 'theirs'"):
        Settings.from_environment()


@pytest.mark.parametrize(("mode", "active"), [("auto", False), ("on", True)])
def test_other_platforms(world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, mode: str, active: bool) -> None:
    world.platform.is_rocm = lambda: False
    monkeypatch.setenv("PORTABLE_INDEXER_VLLM", mode)
    register()
    assert all(text.startswith("active") == active for name, text in state().items() if "CUDA" not in name)


def test_a_hook_that_fails_takes_nothing_with_it(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # V02
    def missing(name: str, function: Any) -> None:
        raise ModuleNotFoundError("no module of that name")

    monkeypatch.setattr("portable_indexer.vllm_plugin.rocm_op.replace_in_dispatcher", missing)
    with caplog.at_level(logging.INFO, "vllm.portable_indexer"):
        register()
    assert state()["ROCm indexer op"] == "inactive: unexpected ModuleNotFoundError: no module of that name"
    assert "no module of that name" in caplog.text
    assert original(getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP))
    assert original(getattr(world.modules[fake_vllm.OPS], fake_vllm.OP))
    assert state()["row plan"].startswith("active") and state()["request map"].startswith("active")


def _drop_field(cls: type, name: str) -> type:
    kept = [(f.name, f.type) for f in dataclasses.fields(cls) if f.name != name]
    return dataclasses.make_dataclass(cls.__name__, kept)


# V04: names, parameters and fields of other versions; each names its reason, and only its hook is off.
CHANGES = {
    "no plan": (fake_vllm.INDEXER, PLAN, None, "row plan", f"has no {fake_vllm.INDEXER}.{PLAN}"),
    "another gate": (fake_vllm.INDEXER, GATE, lambda vllm_config: True, "row plan", "has no parameter"),
    "another plan": (
        fake_vllm.INDEXER,
        PLAN,
        lambda seq_lens_cpu, query_lens_cpu, compress_ratio, tp_size, weights: None,
        "row plan",
        "has a new parameter: weights",
    ),
    "a gate for ROCm too": (
        fake_vllm.INDEXER,
        GATE,
        lambda vllm_config, dcp_world_size, use_pcp, tp_size: vllm_config.is_cuda_alike(),
        "row plan",
        "shards by itself",
    ),
    "no sizes": (
        fake_vllm.INDEXER,
        "DeepseekV32IndexerPrefillMetadata",
        _drop_field(fake_vllm.Prefill, "row_shard_sizes"),
        "ROCm indexer op",
        "has no field row_shard_sizes",
    ),
    "other chunks": (
        fake_vllm.INDEXER,
        "DeepseekV32IndexerPrefillChunkMetadata",
        _drop_field(fake_vllm.Chunk, "skip_kv_gather"),
        "ROCm indexer op",
        "has no field skip_kv_gather",
    ),
    "no op": (fake_vllm.OPS, fake_vllm.OP, None, "ROCm indexer op", "has no vllm._aiter_ops"),
    "somebody else's op": (fake_vllm.OPS, fake_vllm.OP, lambda x: x, "ROCm indexer op", "somebody else"),
    "another map": (
        fake_vllm.MAP,
        "compute_token_to_req_indices",
        lambda query_start_loc, out, tokens: None,
        "request map",
        "has no parameter num_mapped_tokens, num_tokens",
    ),
}


@pytest.mark.parametrize("case", list(CHANGES))
def test_an_unknown_vllm_is_left_alone(world: fake_vllm.World, case: str) -> None:
    module_name, name, value, hook, reason = CHANGES[case]
    module = world.modules[module_name]
    if value is None:
        delattr(module, name)
    else:
        setattr(module, name, value)
    before = dict(vars(module))
    register()
    assert state()[hook].startswith("inactive") and reason in state()[hook], state()[hook]
    if hook == "ROCm indexer op" and module_name == fake_vllm.INDEXER:
        assert original(getattr(world.modules[fake_vllm.ROCM], fake_vllm.OP))
    elif "op" not in case:
        assert dict(vars(module)) == before
    others = {name: text for name, text in state().items() if name not in (hook, "CUDA indexer op")}
    assert any(text.startswith("active") for text in others.values())


def test_an_op_with_a_new_argument_is_left_alone(world: fake_vllm.World) -> None:
    def op(hidden_states: Any, k_cache_prefix: Any, kv_cache: Any, q_fp8: Any, k: Any, weights: Any, topk_tokens: Any,
           head_dim: Any, total_seq_lens: Any, topk_indices_buffer: Any, skip_k_cache_insert: Any,
           compress_ratio: Any, row_scale: Any) -> None:  # fmt: skip
        raise AssertionError

    for name in (fake_vllm.ROCM, fake_vllm.OPS):
        setattr(world.modules[name], fake_vllm.OP, op)
    register()
    assert "has a new parameter: row_scale" in state()["ROCm indexer op"]
    assert getattr(world.modules[fake_vllm.OPS], fake_vllm.OP) is op and not world.dispatched


def test_an_op_that_shards_is_left_alone(world: fake_vllm.World) -> None:
    def op(hidden_states: Any, k_cache_prefix: Any, kv_cache: Any, q_fp8: Any, k: Any, weights: Any, topk_tokens: Any,
           head_dim: Any, total_seq_lens: Any, topk_indices_buffer: Any, skip_k_cache_insert: Any,
           compress_ratio: Any) -> None:  # fmt: skip
        row_shard = k.num_prefills, k.num_decodes, k.num_decode_tokens, k.chunks
        row_shard.exchange_topk(topk_indices_buffer)

    for name in (fake_vllm.ROCM, fake_vllm.OPS):
        setattr(world.modules[name], fake_vllm.OP, op)
    register()
    assert "shards rows by itself (row_shard)" in state()["ROCm indexer op"]
    assert not world.dispatched


def test_cuda_keeps_its_op_and_its_gate(world: fake_vllm.World) -> None:
    world.platform.is_rocm, world.platform.is_cuda = (lambda: False), (lambda: True)
    register()
    assert state()["row plan"].startswith("active") and "(cuda)" in state()["row plan"]
    for name in ("ROCm indexer op", "GLM k-pool op (AMD)"):
        assert state()[name].startswith("inactive: CUDA builds shard by themselves")


def test_a_module_that_comes_later_is_hooked_then(
    world: fake_vllm.World, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delitem(sys.modules, fake_vllm.MAP)
    register()
    assert state()["request map"] == f"waiting for {fake_vllm.MAP}"
    (tmp_path / "metadata.py").write_text(
        "def compute_token_to_req_indices(query_start_loc, out, num_mapped_tokens, num_tokens):\n    return out\n"
    )
    world.modules["vllm.v1.attention.ops"].__path__ = [str(tmp_path)]
    import importlib.util

    found = importlib.util.find_spec(fake_vllm.MAP)
    assert found is not None and found.loader is not None
    assert "return out" in found.loader.get_source(fake_vllm.MAP), "who only looks sees the module's own loader"  # type: ignore[attr-defined]
    module = importlib.import_module(fake_vllm.MAP)
    assert state()["request map"].startswith("active")
    assert not original(module.compute_token_to_req_indices)
    assert module.__spec__ is not None and type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert fake_vllm.MAP not in on_import._waiting


def test_a_failing_callback_does_not_fail_the_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a_late_module.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "a_late_module", raising=False)

    def fail(module: Any) -> None:
        raise KeyError("nothing of that name")

    seen: list[int] = []
    on_import.when_imported("a_late_module", fail)
    on_import.when_imported("a_late_module", lambda module: seen.append(module.VALUE))
    import a_late_module  # type: ignore[import-not-found]

    assert a_late_module.VALUE == 3 and seen == [3]
    assert "nothing of that name" in caplog.text


def test_status_for_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PORTABLE_INDEXER_VLLM", raising=False)
    found = status()
    assert found["mode"] == "auto" and found["kernels"] == "vllm" and isinstance(found["entry_point"], bool)
    monkeypatch.setenv("PORTABLE_INDEXER_VLLM", "maybe")
    assert "PORTABLE_INDEXER_VLLM must be one of off, auto, on" in status()["error"]


@pytest.mark.parametrize(("mode", "kernels"), [("auto", "vllm"), ("off", "ours")])
def test_doctor_says_how_the_switches_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, kernels: str
) -> None:
    from portable_indexer.cli import main

    monkeypatch.setenv("PORTABLE_INDEXER_VLLM", mode)
    monkeypatch.setenv("PORTABLE_INDEXER_VLLM_KERNELS", kernels)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = status() | {"vllm": "0.33.0", "entry_point": True}
    monkeypatch.setattr("portable_indexer.vllm_plugin.status", lambda: found)
    main(["doctor", "--no-self-test"])
    assert f"vLLM       0.33.0, would load the plugin: mode {mode}, kernels {kernels}\n" in capsys.readouterr().out


def test_the_package_declares_the_entry_point() -> None:
    tomllib = pytest.importorskip("tomllib")
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"portable_indexer": "portable_indexer.vllm_plugin:register"}
    assert "portable_indexer.vllm_plugin" in project["tool"]["setuptools"]["packages"]


def test_the_dispatcher_keeps_the_replacement(world: fake_vllm.World) -> None:
    # V15: a registration ends with its Library object, so that must outlive every collection
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("portable_indexer_probe(Tensor(a!) x) -> Tensor(a!)")
    library.impl("portable_indexer_probe", lambda x: x.add_(1), "CPU")
    assert torch.ops.vllm.portable_indexer_probe(torch.zeros(1)).item() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace_in_dispatcher("portable_indexer_probe", lambda x: x.add_(10))
    gc.collect()
    assert torch.ops.vllm.portable_indexer_probe(torch.zeros(1)).item() == 10
    with pytest.raises(hooks.Inactive, match="has no portable_indexer_absent"):
        replace_in_dispatcher("portable_indexer_absent", lambda x: x)


@pytest.mark.parametrize("hip", [None, "6.4.0"])
def test_a_capture_is_seen_on_either_vendor(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    # V08: nothing here asks for CUDA by name
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=answer: answer)
        assert hooks.capturing() is answer
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("this would start a GPU"))
    assert not hooks.capturing()

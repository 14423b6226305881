"""Rule: a row's logits are a function of that row alone. Every way to spread the work gives the same bits.

These tests reach below the public function, to launch choices: they are for the Triton backends.
"""

from __future__ import annotations

import dataclasses

import problems
import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")

from portable_indexer.backend import FP8_ENCODINGS  # noqa: E402
from portable_indexer.backends.triton_common import runtime, scoring  # noqa: E402
from portable_indexer.backends.triton_cuda import launch as cuda  # noqa: E402
from portable_indexer.backends.triton_rocm import launch as rocm  # noqa: E402
from portable_indexer.registry import get_backend  # noqa: E402

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
VERSIONS = ((3, 6), (3, 8), (3, 9))
CHOICES = [(rocm, "gfx942"), (rocm, "gfx950"), (rocm, "gfx90a"), (cuda, "sm_80"), (cuda, "sm_90"), (cuda, "sm_100")]


@pytest.fixture
def backend(backend_name):
    """The backend under test, if it is one of these and can run here."""
    if not backend_name.startswith("triton_"):
        pytest.skip(f"the backend under test is {backend_name}")
    return get_backend(backend_name)


def score(o, choice, **how):
    """Logits into a poisoned buffer that is a little wider than the keys."""
    wide = torch.full((o.q.shape[0], -(-o.k.shape[0] // 4) * 4 + 4), 7.0, device=o.q.device)
    scoring.mqa_logits(
        o.q, o.k, o.k_scale, o.weights, o.ks, o.ke, wide[:, : o.k.shape[0]], choice=choice, units=4, **how
    )
    return wide


def choice_for(backend, o):
    return backend.scoring_choice(o.q.shape[1], o.q.shape[2], o.q.dtype, o.k.dtype)


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("encodings", [(FN, FN), (FNUZ, FNUZ)])
def test_splits_and_variants(heads, encodings, backend, device, generator):
    rows, keys, most = (37, 3000, 1000) if device.type == "cuda" else (5, 400, 30)
    o = problems.make(rows, keys, heads, 128, generator, device=device, q_dtype=encodings[0], k_dtype=encodings[1])
    choice = choice_for(backend, o)
    right = score(o, choice, splits=1)
    for splits in (2, 3, most):
        assert torch.equal(score(o, choice, splits=splits), right)
    assert scoring.is_aligned(o.q, o.k, o.k_scale, o.weights, right)
    for variant in {*scoring.variants(choice), scoring.Variant(True, False)}:
        assert torch.equal(score(o, choice, variant=variant), right), variant


def test_every_slot_of_a_tile(backend, device, generator):
    """The same row in every slot of a tile, beside rows with other bounds."""
    for heads in (32, 64):
        o = problems.make(8, 400, heads, 64, generator, device=device, ragged=True)
        choice = choice_for(backend, o)
        o.q[:] = o.q[:1].clone()
        o.weights[:] = o.weights[:1].clone()
        o.ks[::2], o.ke[::2] = 3, 391
        logits = score(o, choice)[::2, 3:391]
        assert torch.equal(logits, logits[:1].expand_as(logits))


def test_every_packing_offset(backend, device, generator):
    """The same keys at every offset modulo a tile of keys, seen through a window that moves with them."""
    window = 150
    o = problems.make(4, window, 32, 64, generator, device=device)
    choice = choice_for(backend, o)
    o.ks[:], o.ke[:] = 0, window
    right = score(o, choice)[:, :window]
    offsets = range(choice.keys + 1) if device.type == "cuda" else (1, 2, 15, 16, 17, choice.keys - 1, choice.keys)
    for offset in offsets:
        other = problems.make(4, offset + window + 3, 32, 64, generator, device=device)
        other.q, other.weights = o.q, o.weights
        other.k[offset : offset + window] = o.k
        other.k_scale[offset : offset + window] = o.k_scale
        other.ks[:], other.ke[:] = offset, offset + window
        assert torch.equal(score(other, choice)[:, offset : offset + window], right), offset


@pytest.mark.gpu
@pytest.mark.skipif(runtime.interpreting(), reason="the interpreter captures no graph")
def test_nothing_compiles_in_a_captured_graph(backend, device, generator):  # V09, V13
    """After warmup, a capture of both variants compiles nothing, and its replay gives the eager bits."""
    scoring.mqa_logits_kernel.device_caches.clear()
    backend.warmup(device, 48, 64, 64)
    o = problems.make(33, 1000, 48, 64, generator, device=device)
    choice = choice_for(backend, o)
    aligned, unaligned = torch.empty((33, 1000), device=device), torch.empty((33, 1001), device=device)[:, :1000]
    before = [len(cache[0]) for cache in scoring.mqa_logits_kernel.device_caches.values()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in (aligned, unaligned):
            scoring.mqa_logits(*o.args[:1], o.k, o.k_scale, *o.args[2:], out, True, choice=choice, units=132)
    assert [len(cache[0]) for cache in scoring.mqa_logits_kernel.device_caches.values()] == before
    for out in (aligned, unaligned):
        out.fill_(torch.nan)
    graph.replay()
    right = torch.empty_like(aligned)
    backend.fp8_mqa_logits(o.q, o.k, o.k_scale, *o.args[2:], right, True)
    assert torch.equal(aligned, right) and torch.equal(unaligned, right)


@pytest.mark.parametrize("launch,arch", CHOICES)
def test_choices_follow_from_architecture_and_sizes(launch, arch):
    for version in VERSIONS:
        for heads in (1, 2, 3, 4, 8, 16, 32, 48, 64, 100, 128):
            for dim in scoring.HEAD_DIMS:
                for pair in (("fn", "fn"), ("fn", "fnuz"), ("fnuz", "fn"), ("fnuz", "fnuz")):
                    choice = launch.scoring_choice(arch, version, heads, dim, *pair)
                    assert choice.heads * choice.blocks >= heads
                    assert choice.rows % choice.lanes == 0 and choice.heads % choice.pair == 0
                    half = {name.endswith("half") for name in (choice.q_decode, choice.k_decode)}
                    assert len(half) == 1, "a product of two kinds of operand"
                    assert dict(choice.options)["enable_fp_fusion"] is False


def test_native_encodings():  # S04
    assert rocm.scoring_choice("gfx942", (3, 9), 64, 128, "fnuz", "fnuz").k_decode == "fp8"
    assert rocm.scoring_choice("gfx942", (3, 9), 64, 128, "fnuz", "fn").k_decode == "fn_as_fnuz"
    assert rocm.scoring_choice("gfx950", (3, 9), 64, 128, "fn", "fn").k_decode == "fp8"
    assert rocm.scoring_choice("gfx90a", (3, 9), 64, 128, "fn", "fn").k_decode == "fn_as_half"
    assert cuda.scoring_choice("sm_90", (3, 9), 64, 128, "fn", "fn").k_decode == "fp8"
    assert cuda.scoring_choice("sm_80", (3, 9), 64, 128, "fn", "fn").k_decode == "fn_as_half"


@pytest.mark.parametrize("launch,arch,units", [(cuda, "sm_90", 132), (rocm, "gfx942", 304), (rocm, "gfx950", 256)])
def test_splits_fill_whole_waves(launch, arch, units):
    """No more than a tenth of the device's time idle at the sizes of long prefills; one split where rows suffice."""
    for heads in (32, 64):
        choice = launch.scoring_choice(arch, (3, 6), heads, 128, "fn", "fn")
        slots = units * choice.resident
        for rows, keys in ((128, 1 << 20), (32, 1 << 20), (96, 131072), (1024, 1 << 20), (4096, 65536), (4096, 131072)):
            splits = scoring.splits_for(rows, keys, choice, units)
            programs = -(-rows // choice.rows) * splits
            key_tiles = -(-keys // choice.keys)
            share = -(-key_tiles // splits)
            waves = -(-programs // slots)
            ideal = (rows / choice.rows) * (keys / choice.keys) / slots
            assert waves * share <= 1.1 * ideal, (heads, rows, keys, splits)
        assert scoring.splits_for(1 << 20, 4096, choice, units) == 1
        assert scoring.splits_for(1, 1, choice, units) == 1


def test_sizes_beyond_the_kernel_are_refused():
    assert scoring.unsupported(64, 128, 1 << 20) is None
    assert "129" in scoring.unsupported(129, 128, 5)
    assert "96" in scoring.unsupported(64, 96, 5)
    assert str(2**31) in scoring.unsupported(64, 128, 2**31)


def test_alignment_decides_the_variant(generator):
    o = problems.make(8, 64, 16, 64, generator)
    out = torch.empty((8, 64))
    assert scoring.is_aligned(o.q, o.k, o.k_scale, o.weights, out)
    spare = torch.empty((9, 80))
    for q, k, scale, weights, target in (
        (o.q, o.k[:, :32].contiguous().view(-1)[1:1985].view(62, 32), o.k_scale, o.weights, out),
        (o.q, o.k, o.k_scale[3:], o.weights, out),
        (o.q, o.k, o.k_scale[::2], o.weights, out),
        (o.q, o.k, o.k_scale, spare[:8, 1:17], out),
        (o.q, o.k, o.k_scale, o.weights, spare[:8, 2:66]),
        (o.q, o.k, o.k_scale, o.weights, torch.empty((8, 65))[:, :64]),
        (o.q, o.k, o.k_scale, o.weights, torch.empty_strided((2, 64), (1 << 25, 1))),
    ):
        assert not scoring.is_aligned(q, k, scale, weights, target)


class _Compiles:
    """A driver for compiling only: Triton asks it for a target and where tensors live."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(runtime.interpreting(), reason="the interpreter compiles nothing")
@pytest.mark.parametrize("launch,target", [(rocm, ("hip", "gfx942", 64)), (cuda, ("cuda", 90, 32))])
def test_the_list_of_variants_is_closed(launch, target, generator, monkeypatch):  # V09
    """A hundred shapes, sizes of 1 and multiples of 16 among them, compile what `variants` lists and no more."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    kernel = scoring.mqa_logits_kernel
    run = type(kernel).run
    monkeypatch.setattr(driver, "_active", _Compiles(GPUTarget(*target)))
    monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    monkeypatch.setattr(
        type(kernel),
        "run",
        lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs),
    )
    arch = "gfx942" if target[0] == "hip" else "sm_90"
    encoding = launch.NATIVE_FP8["gfx942"] if target[0] == "hip" else "fn"
    choice = dataclasses.replace(launch.scoring_choice(arch, runtime.triton_version(), 8, 32, encoding, encoding))
    dtype = next(dtype for dtype, name in FP8_ENCODINGS.items() if name == encoding)
    for at in range(100):
        rows, keys = [1, 2, 16, 17, 32][at % 5], [1, 3, 16, 48, 100, 128, 1000][at % 7]
        o = problems.make(rows, keys + 3, 8, 32, generator, q_dtype=dtype, k_dtype=dtype)
        first = at % 3
        wide = torch.empty((rows, keys + at % 9))
        bounds = o.ks, o.ke
        scoring.mqa_logits(
            o.q,
            o.k[first : first + keys],
            o.k_scale[first : first + keys],
            o.weights,
            *bounds,
            wide[:, :keys],
            choice=choice,
            units=1 + at % 4,
        )
    compiled = {key for cache in kernel.device_caches.values() for key in cache[0]}
    assert len(compiled) == len(scoring.variants(choice))

"""The metadata on a GPU: no synchronisation, graph replay after changes, two streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from metadata_steps import Step, builder_for, check, check_fences, fenced, random_step

from portable_indexer.metadata import IndexerMetadataBuilder, token_to_req_indices
from portable_indexer.step_metadata import INLINE_GROUPS

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_variants(device: torch.device) -> list[int]:
    """Compiled variants of the map's and of the step's kernel on a GPU."""
    from portable_indexer.backends.triton_common import metadata

    return [len(kernel.device_caches[device.index][0]) for kernel in (metadata._map_kernel, metadata._step_kernel)]


def test_no_build_synchronises(backend_name, device, generator):  # R09
    steps = [random_step(generator) for _ in range(12)]
    steps.append(Step([1] * 40, [8] * 40))  # one group each: more than travel by value
    for step in steps:
        builder = builder_for(step, backend_name, device)
        starts, lens = step.tensors(device)
        with no_synchronisation():
            built = builder.build(
                starts,
                lens,
                query_start_loc_cpu=step.starts,
                seq_lens_cpu=step.host_lens or step.seq_lens,
                num_decodes=step.num_decodes,
                num_tokens=step.starts[-1] + step.padding,
                key_budget=8 if step is steps[-1] else None,
            )
            chunks, views = built.chunks, (built.token_to_req, built.row_keys, built.cu_seqlens_q)
            mapped = token_to_req_indices(starts, built.num_tokens, backend=backend_name)
        assert len(views) == 3 and len(chunks) <= max(1, built.num_prefill_tokens)
        check(step, built, builder)
        assert torch.equal(mapped, built.token_to_req)


def test_a_captured_map_follows_the_boundaries(backend_name, device, generator):  # V09
    reqs, size = 9, 262_145  # a size that no call before the capture had
    query_start_loc = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
    out = torch.empty(size, dtype=torch.int32, device=device)
    token_to_req_indices(query_start_loc, 5, pad_value=-1, backend=backend_name)
    before = compiled_variants(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_to_req_indices(query_start_loc, size, out=out, pad_value=-1, backend=backend_name)
    assert compiled_variants(device) == before
    for total in (0, 5, size, 100_000):
        cuts = torch.randint(0, total + 1, (reqs - 1,), generator=generator).sort().values
        starts = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])])
        query_start_loc.copy_(starts.int())
        out.fill_(-77)
        graph.replay()
        want = torch.full((size,), -1, dtype=torch.int32)
        want[:total] = torch.repeat_interleave(torch.arange(reqs, dtype=torch.int32), starts.diff())
        assert torch.equal(out.cpu(), want)


def test_a_captured_step_follows_boundaries_lengths_and_counts(backend_name, device, generator):  # V11
    reqs, capacity = 8, 6000
    builder = fenced(IndexerMetadataBuilder(capacity, reqs, 50_000, next_n=4, device=device, backend=backend_name))
    starts = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
    lens = torch.zeros(reqs, dtype=torch.int32, device=device)
    before = compiled_variants(device)
    graph = torch.cuda.CUDAGraph()
    captured = Step([1, 1, 1, 5, 5, 5, 5, 5], [100] * 8, num_decodes=3)
    with torch.cuda.graph(graph):
        built = builder.build(
            starts,
            lens,
            query_start_loc_cpu=captured.starts,
            seq_lens_cpu=[5000] * 8,  # what a replay may have at most
            num_decodes=3,
            num_tokens=capacity,
        )
        (chunk,) = built.chunks
        views = (built.token_to_req, built.row_keys, built.cu_seqlen_ks, built.cu_seqlen_ke)
    assert compiled_variants(device) == before
    replays = [
        captured,
        Step([1, 1, 1, 900, 0, 0, 3, 0], [5000, 1, 300, 5000, 0, 5000, 3, 4999], num_decodes=3),
        Step([1, 0, 0, 0, 0, 0, 0, 0], [100, 0, 0, 0, 0, 0, 0, 0], num_decodes=3),
        Step([0] * 8, [0] * 8, num_decodes=3),
        Step([4, 4, 4, 5000, 1, 1, 1, 1], [7, 4, 2, 5000, 1, 1, 1, 1], num_decodes=3),
    ]
    for step in replays:
        for value, now in zip((starts, lens), step.tensors(device), strict=True):
            value.copy_(now)
        for buffer in builder._buffers.written:
            buffer.fill_(-77)
        graph.replay()
        torch.cuda.synchronize()
        check_fences(builder)
        eager = builder_for(step, backend_name, device, max_tokens=capacity)
        again = step.build(eager)
        check(step, again, eager)
        for view, buffer in zip(views, ("token_to_req", "row_keys", "cu_seqlen_ks", "cu_seqlen_ke"), strict=True):
            assert torch.equal(view, getattr(eager._buffers, buffer)), buffer
        packed = [request for request in range(3, 8) for _ in range(step.seq_lens[request])]
        assert chunk.key_to_req.tolist() == packed + [-1] * (25_000 - len(packed))
        assert int(chunk.key_starts[-1]) == len(packed)


def test_a_captured_step_has_no_transfer(backend_name, device):
    step = Step([1] * (INLINE_GROUPS + 1), [8] * (INLINE_GROUPS + 1))
    builder = builder_for(step, backend_name, device)
    starts, lens = step.tensors(device)
    usual = {"query_start_loc_cpu": step.starts, "seq_lens_cpu": step.seq_lens, "key_budget": 8}
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            with pytest.raises(RuntimeError, match="key_budget"):
                builder.build(starts, lens, **usual)
        finally:
            graph.capture_end()


def test_many_steps_in_flight_keep_their_groups(backend_name, device, generator):
    """The pinned tables go round while the device is still behind."""
    reqs = 60
    builder = IndexerMetadataBuilder(reqs, reqs, 9 * reqs, device=device, backend=backend_name)
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=device)
    inputs, results, wanted = [], [], []
    for _ in range(40):
        lens = torch.randint(1, 9, (reqs,), generator=generator)
        inputs.append((lens.int().to(device), lens.tolist()))
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for number, (lens, host) in enumerate(inputs):
        built = builder.build(
            starts, lens, query_start_loc_cpu=list(range(reqs + 1)), seq_lens_cpu=host, key_budget=8 + number % 4
        )
        results.append(torch.cat([chunk.cu_seqlen_ks for chunk in built.chunks]))
        first = []
        for chunk in built.chunks:
            own = host[chunk.request_start : chunk.request_end]
            first += [sum(own[:request]) for request in range(len(own))]
        wanted.append(first)
    assert [result.tolist() for result in results] == wanted


def test_two_builders_on_two_streams(backend_name, device, generator):
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    steps = [[random_step(generator, most_reqs=12) for _ in range(6)] for _ in streams]
    work = []
    torch.cuda.synchronize()
    for number in range(6):
        for stream, own in zip(streams, steps, strict=True):
            step = own[number]
            with torch.cuda.stream(stream):
                builder = builder_for(step, backend_name, device)
                work.append((step, step.build(builder), builder))
    torch.cuda.synchronize()
    for step, built, builder in work:
        check(step, built, builder)


def test_one_builder_after_another_reuses_the_compiled_kernels(backend_name, device):
    IndexerMetadataBuilder(8, 2, 8, device=device, backend=backend_name)
    # The map is compiled by its first call, in this process by an earlier test or by this one.
    token_to_req_indices(torch.zeros(1, dtype=torch.int32, device=device), 1, backend=backend_name)
    assert compiled_variants(device) == [1, 1]
    for reqs in (1, 16, 17):
        step = Step([16] * reqs, [17] * reqs)
        check(step, step.build(builder := builder_for(step, backend_name, device)), builder)
        token_to_req_indices(step.tensors(device)[0][:reqs], 16 * reqs, backend=backend_name)
    assert compiled_variants(device) == [1, 1]


@pytest.mark.multi_gpu
def test_a_step_on_another_gpu_than_the_current_one(backend_name, device, generator):
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    for where in (other, device, other):
        for step in (random_step(generator), Step([1] * 40, [8] * 40)):
            builder = builder_for(step, backend_name, where)
            check(step, step.build(builder, key_budget=None if len(step.query_lens) != 40 else 8), builder)
            starts = step.tensors(where)[0]
            mapped = token_to_req_indices(starts, step.starts[-1], backend=backend_name)
            lens = torch.tensor(step.query_lens)
            assert torch.equal(mapped.cpu(), torch.repeat_interleave(torch.arange(len(lens), dtype=torch.int32), lens))
    assert torch.cuda.current_device() == device.index
    assert compiled_variants(other) == [1, 1]

"""What a builder keeps on the host from step to step, and what it must not keep."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from metadata_steps import Step, builder_for, check, fenced, random_step

from portable_indexer import metadata, step_metadata
from portable_indexer.metadata import IndexerMetadataBuilder
from portable_indexer.prefill_chunks import CUT_TOGETHER, PrefillChunk

HOST = {
    "lists": list,
    "int32": lambda values: torch.tensor(values, dtype=torch.int32),
    "int64": torch.tensor,
}


def build(step: Step, builder: IndexerMetadataBuilder, host=list, **options):
    starts, lens = step.tensors(builder.device)
    given = {"query_start_loc_cpu": host(step.starts), "seq_lens_cpu": host(step.host_lens or step.seq_lens)}
    options = {"num_decodes": step.num_decodes, "num_tokens": step.starts[-1] + step.padding, **options}
    return builder.build(starts, lens, **given, **options)


@pytest.mark.parametrize("host", HOST)
def test_any_steps_in_a_row_on_one_builder(backend_name, device, generator, host):
    """Counts of requests and rows come, go and come again; longer steps leave nothing."""
    builder = fenced(IndexerMetadataBuilder(6000, 40, 40_000, next_n=4, device=device, backend=backend_name))
    for trial in range(12):
        step = random_step(generator, most_reqs=8)
        step.compress_ratio, step.num_decodes = 1, 0
        if trial % 3:  # decode requests of next_n rows, the same counts again and again
            decodes = (2, 5)[trial % 2]
            step.query_lens = [4] * decodes + step.query_lens
            step.seq_lens = [9 + trial] * decodes + step.seq_lens
            step.host_lens = [9 + trial] * decodes + step.host_lens
            step.num_decodes = decodes
        if trial % 3 == 1:  # and nothing else
            del step.query_lens[decodes:], step.seq_lens[decodes:], step.host_lens[decodes:]
        built = build(step, builder, HOST[host], logits_budget=200_000, key_budget=10_000)
        check(step, built, builder)
        if step.num_decodes:
            assert built.decode_row_keys_by_request.shape == (step.num_decodes, 4)


@pytest.mark.parametrize("host", HOST)
@pytest.mark.parametrize("query_lens", [[4, 3], [3, 4], [0, 4], [4, 4]])
def test_decode_requests_of_other_rows_are_not_taken_for_uniform_ones(backend_name, device, host, query_lens):
    builder = fenced(IndexerMetadataBuilder(64, 8, 64, next_n=4, device=device, backend=backend_name))
    check(step := Step([4, 4], [9, 8], num_decodes=2), build(step, builder, HOST[host]), builder)
    for more in ([], [5, 0]):
        step = Step([*query_lens, *more], [7, 6, 5, 9][: 2 + len(more)], num_decodes=2, padding=3)
        built = build(step, builder, HOST[host])
        check(step, built, builder)
        if query_lens == [4, 4]:
            assert built.decode_row_keys_by_request.tolist() == [[4, 5, 6, 7], [3, 4, 5, 6]]
        else:
            with pytest.raises(ValueError, match="next_n rows each"):
                _ = built.decode_row_keys_by_request


@pytest.mark.parametrize("host", HOST)
@pytest.mark.parametrize(
    "starts, message",
    [([0, 4, 8, 6, 9], "not decrease"), ([0, 4, 8, 7, 7], "not decrease"), ([0, 5, 8, 9, 9], "next_n = 4 rows")],
)
def test_starts_behind_uniform_ones_are_looked_at(backend_name, device, host, starts, message):
    builder = IndexerMetadataBuilder(64, 8, 64, next_n=4, device=device, backend=backend_name)
    own = torch.tensor(starts, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        builder.build(
            own,
            own[1:].contiguous(),
            query_start_loc_cpu=HOST[host](starts),
            seq_lens_cpu=HOST[host]([9, 9, 9, 9]),
            num_decodes=2,
        )


def test_more_counts_than_are_kept(backend_name, device, monkeypatch):
    monkeypatch.setattr(metadata, "KEPT_DECODES", 2)
    monkeypatch.setattr(step_metadata, "KEPT_VIEWS", 3)
    builder = fenced(IndexerMetadataBuilder(16, 8, 1, next_n=2, device=device, backend=backend_name))
    for reqs in (1, 5, 3, 1, 8, 5):
        step = Step([2] * reqs, list(range(4, 4 + reqs)), num_decodes=reqs)
        check(step, build(step, builder, HOST["int32"]), builder)
        assert len(builder._decodes) <= 2 and len(builder._buffers._views) <= 3


def test_steps_of_one_size_share_their_views_and_builders_do_not(backend_name, device):
    builders = [IndexerMetadataBuilder(16, 8, 8, device=device, backend=backend_name) for _ in range(2)]
    first, second = (
        [build(Step([1] * reqs, [7] * reqs, num_decodes=reqs), builder) for builder in builders] for reqs in (3, 3)
    )
    other = [built.token_to_req for built in second]
    assert other[0] is not other[1] and other[0].data_ptr() != other[1].data_ptr()
    again = build(Step([1, 1, 1], [9, 5, 6], num_decodes=3), builders[0])
    assert again.token_to_req is other[0] and again.row_keys.tolist() == [9, 5, 6]
    assert again.cu_seqlens_q is first[0].cu_seqlens_q
    longer = build(Step([1] * 4, [9, 5, 6, 7], num_decodes=4), builders[0])
    assert longer.token_to_req.tolist() == [0, 1, 2, 3] and again.cu_seqlens_q.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("host", HOST)
def test_the_callers_lengths_may_change_after_the_build(backend_name, device, host):
    """Chunks are cut when they are asked for, of the lengths that ``build`` was given."""
    step = Step([4, 6, 2], [40, 60, 20], host_lens=[41, 60, 25])
    builder = builder_for(step, backend_name, device)
    starts, lens = step.tensors(device)
    host_starts, host_lens = HOST[host](step.starts), HOST[host](step.host_lens)
    built = builder.build(
        starts, lens, query_start_loc_cpu=host_starts, seq_lens_cpu=host_lens, key_budget=70, logits_budget=1000
    )
    for values in (host_starts, host_lens):
        for place in range(len(values)):
            values[place] = 1
    check(step, built, builder)
    assert built.prefill_query_lens == [4, 6, 2] and built.prefill_seq_lens == [41, 60, 25]
    assert [chunk.total_keys for chunk in built.chunks if not chunk.skip_kv_gather] == [41, 60, 25]


def test_the_chunks_are_a_sequence_that_is_cut_once(backend_name, device):
    rows = 5 * CUT_TOGETHER + 5
    step = Step([2, rows, 0, 7], [10, rows, 9, 70])
    builder = builder_for(step, backend_name, device)
    built = build(step, builder, logits_budget=4 * rows, key_budget=rows)
    chunks = built.chunks
    total = len(chunks)
    assert total > rows and built.chunks is chunks and repr(chunks) == f"PrefillChunks(<{total} chunks>)"
    middle, last = chunks[total // 2], chunks[-1]
    assert isinstance(middle, PrefillChunk) and last.token_end == step.starts[-1]
    check(step, built, builder)
    whole = list(chunks)
    assert len(whole) == total and whole[total // 2] is middle and chunks[total - 1] is last is whole[-1]
    assert all(one is other for one, other in zip(chunks[3:70:2], whole[3:70:2], strict=True))
    assert all(one is other for one, other in zip(reversed(chunks), whole[::-1], strict=True))
    for index in (total, -total - 1):
        with pytest.raises(IndexError):
            chunks[index]
    # A group's chunks gather once, and share what belongs to the group.
    for before, chunk in itertools.pairwise(whole):
        same = chunk.request_start == before.request_start
        assert chunk.skip_kv_gather == same == (chunk.key_to_req is before.key_to_req)


def test_decode_steps_have_no_chunks(backend_name, device):
    step = Step([1, 1], [5, 6], num_decodes=2)
    chunks = build(step, builder_for(step, backend_name, device)).chunks
    assert len(chunks) == 0 and list(chunks) == [] and chunks[:] == []
    with pytest.raises(IndexError):
        chunks[0]


def test_chunks_that_the_next_step_has_overwritten_are_not_cut(backend_name, device):
    builder = IndexerMetadataBuilder(600, 2, 600, device=device, backend=backend_name)
    first = build(Step([2, 500], [9, 500]), builder, logits_budget=2000, key_budget=500)
    chunks, cut = first.chunks, first.chunks[0]
    build(Step([3], [9]), builder)
    assert len(chunks) > 2 * CUT_TOGETHER and chunks[0] is cut
    for ask in (lambda: chunks[-1], lambda: list(chunks), lambda: chunks[0:400:399]):
        with pytest.raises(RuntimeError, match="another step"):
            ask()


def test_a_step_that_is_let_go_is_gone_at_once(backend_name, device):
    """No cycle keeps its views until the garbage collector comes."""
    builder = IndexerMetadataBuilder(8, 2, 40, device=device, backend=backend_name)
    built = build(Step([2, 3], [9, 9]), builder)
    gone = [weakref.ref(built), weakref.ref(built.chunks[0].key_to_req)]
    gc.disable()
    try:
        del built
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()

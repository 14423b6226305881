"""The metadata contract, on whichever backend is under test."""

from __future__ import annotations

import pytest
import torch
from metadata_steps import POISON, Step, builder_for, check, check_fences, fenced, random_step

from portable_indexer.chunks import LOGIT_BYTES
from portable_indexer.metadata import IndexerMetadataBuilder

HUGE = 1 << 50


def test_random_steps_match_the_step_written_out(backend_name, device, generator):
    budgets = ((HUGE, 1 << 30), (40_000, 10_000), (400_000, 2_000), (4, 10_000))
    for trial in range(10):
        step = random_step(generator)
        logits_budget, key_budget = budgets[trial % 4]
        builder = builder_for(step, backend_name, device)
        built = step.build(builder, logits_budget=logits_budget, key_budget=key_budget)
        check(step, built, builder)
        for chunk in built.chunks:
            rows = chunk.token_end - chunk.token_start
            assert chunk.total_keys <= key_budget
            assert rows == 1 or rows * chunk.total_keys * LOGIT_BYTES <= logits_budget


def test_a_shorter_step_resets_what_a_longer_one_left(backend_name, device, generator):
    builder = fenced(IndexerMetadataBuilder(9000, 40, 120_000, next_n=500, device=device, backend=backend_name))
    for _ in range(6):
        step = random_step(generator, most_reqs=4)
        step.compress_ratio = 1
        check(step, step.build(builder), builder)


@pytest.mark.parametrize("reqs", [17, 40, 100])
def test_more_groups_than_travel_by_value(backend_name, device, generator, reqs):
    lens = torch.randint(5, 9, (reqs,), generator=generator).tolist()
    step = Step([1 + length // 3 for length in lens], lens, num_decodes=reqs // 5)
    builder = builder_for(step, backend_name, device)
    built = step.build(builder, key_budget=9)
    assert len({chunk.request_start for chunk in built.chunks}) == reqs - reqs // 5
    check(step, built, builder)


@pytest.mark.parametrize("groups", [15, 16, 17, 18])
def test_the_number_of_groups_around_what_travels_by_value(backend_name, device, groups):
    step = Step([2] * groups, list(range(2, groups + 2)), host_lens=[groups + 3] * groups)
    builder = builder_for(step, backend_name, device)
    built = step.build(builder, key_budget=groups + 3)
    assert len(built.chunks) == groups
    check(step, built, builder)


def test_verify_rows_see_their_own_position_and_all_before(backend_name, device):  # S14
    step = Step([4], [8], num_decodes=1)
    built = step.build(builder_for(step, backend_name, device))
    assert built.decode_row_keys.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("seq_len", [0, -5, 1, -(2**31), 1 - 2**31])
def test_lengths_never_fall_below_zero(backend_name, device, seq_len):  # T13
    step = Step([2, 2], [seq_len, 6], num_decodes=2)
    built = step.build(builder_for(step, backend_name, device, max_keys=10))
    assert built.decode_row_keys_by_request.tolist() == [[max(seq_len - 1, 0), max(seq_len, 0)], [5, 6]]


def test_keys_count_compressed_entries_rounded_down(backend_name, device):  # S37
    step = Step([1] * 4, [7, 8, 11, 12], num_decodes=4, compress_ratio=4)
    assert step.build(builder_for(step, backend_name, device)).row_keys.tolist() == [1, 2, 2, 3]
    prefill = Step([3, 5], [7, 12], compress_ratio=4)
    built = prefill.build(builder_for(prefill, backend_name, device))
    assert built.cu_seqlen_ks.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert built.cu_seqlen_ke.tolist() == [1, 1, 1, 3, 3, 3, 3, 4]


def test_host_lengths_may_be_upper_bounds(backend_name, device):  # P08
    step = Step([4, 4], [103, 50], host_lens=[105, 60])
    builder = builder_for(step, backend_name, device)
    built = step.build(builder)
    check(step, built, builder)
    (chunk,) = built.chunks
    assert chunk.cu_seqlen_ke.tolist() == [100, 101, 102, 103, 150, 151, 152, 153]
    assert chunk.total_keys == 165 and chunk.key_to_req.tolist()[153:] == [-1] * 12
    assert built.prefill_seq_lens == [105, 60] and built.prefill_query_lens == [4, 4]


def test_the_layout_of_a_step_is_not_the_last_ones(backend_name, device):  # R01, R02
    builder = IndexerMetadataBuilder(8, 2, 100, next_n=4, device=device, backend=backend_name)
    draft = Step([4, 4], [9, 9], num_decodes=2).build(builder)
    assert draft.token_to_req.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    following = Step([1, 1], [6, 7], num_decodes=2).build(builder)
    assert following.token_to_req.tolist() == [0, 1] and following.row_keys.tolist() == [6, 7]
    assert builder._buffers.token_to_req.tolist() == [0, 1] + [0] * 6


def test_rows_map_to_requests_not_to_themselves(backend_name, device):  # R05
    step = Step([3] * 256, [100 + request for request in range(256)], num_decodes=256)
    built = step.build(builder_for(step, backend_name, device))
    assert built.num_tokens == 768 and int(built.token_to_req.max()) == 255
    assert built.decode_row_keys_by_request.shape == (256, 3)
    assert built.decode_row_keys_by_request[:, 2].tolist() == step.seq_lens


@pytest.mark.parametrize("longest, rows", [(200_000, 2), (65_536, 2), (65_536, 4)])
def test_draft_rows_at_the_longest_context_stay_inside_it(backend_name, device, longest, rows):  # R07, R08
    step = Step([rows], [longest], num_decodes=1)
    built = step.build(builder_for(step, backend_name, device, max_keys=1))
    assert built.row_keys.tolist() == list(range(longest - rows + 1, longest + 1))


def test_one_unit_of_keys_beyond_131328_tokens(backend_name, device):  # R10
    step = Step([64, 64], [131_328, 131_332], compress_ratio=4)
    built = step.build(builder_for(step, backend_name, device))
    (chunk,) = built.chunks
    assert chunk.key_starts.tolist() == [0, 32_832, 65_665] and chunk.total_keys == 65_665
    assert int(chunk.cu_seqlen_ke[-1]) == 65_665
    assert chunk.key_to_req.tolist() == [0] * 32_832 + [1] * 32_833


def test_device_lengths_above_the_hosts_write_nothing_outside(backend_name, device):  # R12
    step = Step([2, 3, 1], [500_000, 4, 500_000], host_lens=[2_478, 4, 4])
    builder = builder_for(step, backend_name, device)
    built = step.build(builder, key_budget=2_482)
    check_fences(builder)
    for chunk in built.chunks:
        assert int(chunk.cu_seqlen_ke.max()) <= chunk.total_keys
        assert set(chunk.key_to_req.tolist()) <= {-1, *range(chunk.request_start, chunk.request_end)}


def test_memory_is_a_few_integers_a_token(backend_name, device):  # R13
    buffers = IndexerMetadataBuilder(65_536, 256, 1000, device=device, backend=backend_name)._buffers
    total = sum(buffer.numel() for buffer in (*buffers.written, buffers.arange))
    assert total == 5 * 65_536 + 1 + 2 * 256 + 1000


def test_capacity_counts_all_requests_together(backend_name, device):  # R14
    step = Step([16] * 4, [40_960] * 4)
    with pytest.raises(ValueError, match="163840 keys, more than max_keys = 131072"):
        step.build(builder_for(step, backend_name, device, max_keys=131_072))
    builder = builder_for(step, backend_name, device)
    built = step.build(builder, key_budget=2048 * 64)
    assert [chunk.total_keys for chunk in built.chunks] == [3 * 40_960, 40_960]
    check(step, built, builder)


def test_two_builders_share_nothing(backend_name, device):  # R15
    first, second = Step([4] * 3, [10, 20, 30], num_decodes=3), Step([4] * 3, [7, 8, 9], num_decodes=3)
    builders = [builder_for(step, backend_name, device) for step in (first, second)]
    built = [step.build(builder) for step, builder in zip((first, second), builders, strict=True)]
    check(first, built[0], builders[0])
    check(second, built[1], builders[1])
    assert built[0].num_tokens == 12


def test_padded_rows_see_nothing(backend_name, device):  # R16
    step = Step([1] * 3, [5, 6, 7], num_decodes=3, padding=1)
    built = step.build(builder_for(step, backend_name, device))
    assert built.row_keys.tolist() == [5, 6, 7, 0] and built.num_decode_tokens == 3


def test_keys_of_another_cache_do_not_fit(backend_name, device):  # R19
    step = Step([8], [17_952])
    with pytest.raises(ValueError, match="17952 keys, more than key_budget = 2478"):
        step.build(builder_for(step, backend_name, device, max_keys=2_478))


def test_a_step_that_was_overwritten_is_not_read(backend_name, device):  # V16
    builder = IndexerMetadataBuilder(8, 2, 100, device=device, backend=backend_name)
    first = Step([3, 2], [3, 2]).build(builder)
    held = first.token_to_req
    second = Step([1, 4], [9, 9]).build(builder)
    assert second.is_current and not first.is_current
    for name in ("row_keys", "cu_seqlen_ks", "cu_seqlen_ke", "decode_row_keys", "chunks"):
        with pytest.raises(RuntimeError, match="another step"):
            getattr(first, name)
    # Slices, not copies: the view cut before shows the new step.
    assert held.data_ptr() == second.token_to_req.data_ptr() == builder._buffers.token_to_req.data_ptr()
    assert second.cu_seqlens_q.data_ptr() == builder._buffers.arange.data_ptr()
    assert held.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_decodes": 3}, "num_decodes"),
        ({"num_decodes": 0.5}, "num_decodes must be an integer"),
        ({"num_decodes": True}, "num_decodes must be an integer"),
        ({"num_tokens": 6.5}, "num_tokens must be an integer"),
        ({"logits_budget": 2.5e9}, "logits_budget must be an integer"),
        ({"logits_budget": "512"}, "logits_budget must be an integer"),
        ({"key_budget": 50.5}, "key_budget must be an integer"),
        ({"num_decodes": 2}, "next_n = 1 rows"),
        ({"num_tokens": 4}, "rows"),
        ({"num_tokens": 9}, "max_tokens = 8"),
        ({"logits_budget": 3}, "logits_budget"),
        ({"key_budget": 0}, "key_budget"),
        ({"key_budget": 8}, "key_budget = 8"),
        ({"query_start_loc_cpu": [0, 2]}, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": [1, 2, 5]}, "query_start_loc_cpu"),
        ({"query_start_loc_cpu": [0, 6, 5]}, "query_start_loc_cpu"),
        ({"seq_lens_cpu": torch.tensor([9.0, 9.0])}, "seq_lens_cpu"),
        ({"seq_lens_cpu": [9, True]}, "seq_lens_cpu"),
        ({"seq_lens_cpu": [9, 99]}, "max_keys = 100"),
        ({"seq_lens_cpu": [9, 9, 9], "query_start_loc_cpu": [0, 2, 5, 5]}, "query_start_loc"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(backend_name, device, arguments, message):
    step = Step([2, 3], [9, 9])
    builder = fenced(IndexerMetadataBuilder(8, 2, 100, device=device, backend=backend_name))
    starts, lens = step.tensors(device)
    usual = {"query_start_loc_cpu": step.starts, "seq_lens_cpu": step.seq_lens}
    with pytest.raises((TypeError, ValueError), match=message):
        builder.build(starts, lens, **{**usual, **arguments})
    for buffer in builder._buffers.written:
        assert bool((buffer == POISON).all())


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])
def test_device_vectors_must_be_plain_int32(backend_name, device, name):  # R11
    step = Step([2, 3], [9, 9])
    builder = IndexerMetadataBuilder(8, 2, 100, device=device, backend=backend_name)
    usual = {"query_start_loc_cpu": step.starts, "seq_lens_cpu": step.seq_lens}
    starts, lens = step.tensors(device)
    vectors = {"query_start_loc": starts, "seq_lens": lens}
    plain = vectors[name]
    for bad in (plain.long(), plain[:, None].expand(-1, 7).contiguous()[:, 0], plain[:-1], plain[None]):
        with pytest.raises(ValueError, match=name):
            builder.build(**{**vectors, name: bad}, **usual)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (1 << 31, 1, 1)])
def test_capacities_are_checked(backend_name, device, sizes):
    with pytest.raises(ValueError, match="max_"):
        IndexerMetadataBuilder(*sizes, device=device, backend=backend_name)

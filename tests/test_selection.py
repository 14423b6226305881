"""The contract of ``top_k_per_row``, on the backend under test: which ids, in which order, from which keys alone."""

from __future__ import annotations

import pytest
import torch

import portable_indexer as pi

POISON = 2**31 - 1
INF = float("inf")
NAN = float("nan")


def oracle(logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int) -> torch.Tensor:
    """Row by row, by a stable sort of Python numbers: slow, and independent of every backend."""
    out = torch.full((logits.shape[0], topk), -1, dtype=torch.int32)
    for m, (row, start, end) in enumerate(zip(logits.cpu(), ks.tolist(), ke.tolist(), strict=True)):
        first, last = max(start, 0), min(end, logits.shape[1])
        scores = [-INF if s != s else s for s in row[first : max(last, first)].tolist()]
        best = sorted(range(len(scores)), key=lambda i, s=scores: (-s[i], i))[:topk]
        ids = sorted(i + first - start for i in best)
        out[m, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return out


def choose(
    logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int, backend: str, pad: int = 3
) -> torch.Tensor:
    """Run into a poisoned, pitched buffer; see that the padding is left alone. The answer, on the CPU."""
    buffer = torch.full((logits.shape[0], topk + pad), POISON, dtype=torch.int32, device=logits.device)
    returned = pi.top_k_per_row(logits, ks, ke, topk, out=buffer, backend=backend)
    assert returned is buffer
    assert (buffer[:, topk:] == POISON).all()
    return buffer[:, :topk].cpu()


def check(logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int, backend: str) -> torch.Tensor:
    """Compare all ids, exactly and in order; scores outside [ks, ke) are poisoned first."""
    column = torch.arange(logits.shape[1], device=logits.device)
    outside = (column < ks[:, None]) | (column >= ke[:, None])
    logits.masked_fill_(outside & (column % 2 == 0), INF)
    logits.masked_fill_(outside & (column % 2 == 1), NAN)
    got = choose(logits, ks, ke, topk, backend)
    right = oracle(logits, ks, ke, topk)
    assert torch.equal(got, right), [(m, got[m], right[m]) for m in (got != right).any(dim=1).nonzero()[:2, 0]]
    return got


def whole(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ks = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
    return ks, torch.full_like(ks, logits.shape[1])


def integers(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_logits(shape: tuple[int, int], generator: torch.Generator, levels: int = 0) -> torch.Tensor:
    """Normal scores, or with ``levels`` few distinct ones of both signs, so that ties decide."""
    if levels:
        return torch.randint(-levels, levels + 1, shape, generator=generator).float() / 4
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("levels", [0, 2, 32])
@pytest.mark.parametrize("topk", [1, 2, 63, 512, 1000, 2048, 4096])
def test_random_rows(
    topk: int, levels: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T28
    logits = random_logits((5, 5003), generator, levels).to(device)
    ks = integers([0, 1, 17, 2500, 31], device)
    ke = integers([5003, 5002, 4999, 5003, 40], device)
    check(logits, ks, ke, topk, backend_name)


@pytest.mark.parametrize("levels", [0, 1, 40])
@pytest.mark.parametrize("width", [16385, 32769, 65536])
def test_long_rows(
    width: int, levels: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T04
    logits = random_logits((4, width), generator, levels).to(device)
    ks = integers([0, 3, 5000, width - 2060], device)
    ke = integers([width, width - 1, width - 77, width], device)
    check(logits, ks, ke, 512 if width < 65536 else 2048, backend_name)


@pytest.mark.parametrize("width", [1023, 1024, 1025, 3072, 3073, 4096])
def test_widths_where_blocks_and_waves_end(
    width: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T21 T22
    logits = random_logits((4, width), generator, 3).to(device)
    ks, ke = whole(logits)
    check(logits, ks, ke, 500, backend_name)


def test_lengths_around_k(backend_name: str, device: torch.device, generator: torch.Generator) -> None:  # T12
    logits = random_logits((7, 3000), generator).to(device)
    ks = integers([0, 0, 0, 7, 7, 7, 900], device)
    ke = integers([100, 1, 2048, 2055, 2056, 2054, 900], device)
    got = check(logits, ks, ke, 2048, backend_name)
    assert (got >= 0).sum(dim=1).tolist() == [100, 1, 2048, 2048, 2048, 2047, 0]


def test_empty_and_negative_lengths(backend_name: str, device: torch.device, generator: torch.Generator) -> None:  # T13
    logits = random_logits((6, 200), generator).to(device)
    ks = integers([0, 0, 0, 150, 200, 60], device)
    ke = integers([-1, 0, -5, 100, 300, 60], device)
    assert (check(logits, ks, ke, 16, backend_name) == -1).all()


@pytest.mark.parametrize("width", [40, 700, 20000])
def test_lengths_beyond_32_bits(
    width: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T13
    """ke - ks may lie below every int32: no key, no read, and every id written."""
    least, most = -(2**31), 2**31 - 1
    logits = random_logits((7, width), generator).to(device)
    ks = integers([0, 1, 5, most, most, 3, 7], device)
    ke = integers([least, least, least + 3, least, 10, width, -most], device)
    check(logits, ks, ke, 30, backend_name)


@pytest.mark.parametrize("width", [700, 20000])
def test_bounds_beyond_the_tensor(
    width: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:
    """Keys are max(ks, 0) <= n < min(ke, width), and ids stay relative to ks."""
    logits = random_logits((3, width), generator).to(device)
    check(logits, integers([-9, 5, -3], device), integers([width + 50, width + 1, 100], device), 300, backend_name)


@pytest.mark.parametrize("width", [4096, 20000])
def test_special_values(
    width: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # S18 T02
    """NaN as -inf, -0.0 as 0.0, infinities, denormals, all equal, and values beyond float16."""
    logits = random_logits((9, width), generator)
    logits[0] = NAN
    logits[1, torch.randperm(width, generator=generator)[: width // 3]] = NAN
    logits[2] = -INF
    logits[2, 5 : width - 5 : 7] = 1.0
    logits[3] = torch.where(torch.rand(width, generator=generator) < 0.5, -0.0, 0.0)
    logits[4] = torch.randint(0, 40, (width,), generator=generator).float() * 2**-149
    logits[5] = torch.randn(width, generator=generator) * 1e30
    logits[6] = (torch.randint(0, 1024, (width,), generator=generator, dtype=torch.int32) + 0x3F900000).view(
        torch.float32
    )
    logits[7] = 3.25
    logits[8, ::3] = INF
    logits[8, 1::3] = -INF
    logits = logits.to(device)
    check(logits, *whole(logits), 512, backend_name)


def test_all_nan_rows_give_the_first_ids(backend_name: str, device: torch.device) -> None:  # S18
    logits = torch.full((2, 100), NAN, device=device)
    got = choose(logits, *whole(logits), 64, backend_name)
    assert torch.equal(got, torch.arange(64, dtype=torch.int32).expand(2, 64))


@pytest.mark.parametrize("share", [0.03, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("top", [INF, 3.4028234663852886e38, 0.0, -INF])
def test_the_best_value_is_common(
    top: float, share: float, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:
    """The k-th score is the largest there is, at the ends of the range too: ties alone decide, or nearly."""
    width = 9500
    logits = -torch.rand((2, width), generator=generator) - 1 if top > -INF else torch.full((2, width), -INF)
    logits[torch.rand((2, width), generator=generator) < share] = top
    logits = logits.to(device)
    check(logits, *whole(logits), 256, backend_name)


def test_values_that_float16_cannot_tell_apart(
    backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T01
    values = (1000 + torch.arange(16384) * 1e-3)[torch.randperm(16384, generator=generator)]
    logits = values[None].to(device)
    check(logits, *whole(logits), 2048, backend_name)


@pytest.mark.parametrize("order", ["ascending", "descending", "blocks", "one high block"])
def test_ordered_scores(order: str, backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """A sample of such rows says little about them."""
    width = 24000
    values = random_logits((2, width), generator).sort(dim=1).values
    if order == "descending":
        values = values.flip(1)
    elif order == "blocks":
        values = values.reshape(2, 10, -1)[:, torch.randperm(10, generator=generator)].reshape(2, -1)
    elif order == "one high block":
        values = random_logits((2, width), generator)
        values[:, 7003:8100] += 30
    logits = values.contiguous().to(device)
    check(logits, integers([0, 13], device), integers([width, width - 5], device), 600, backend_name)


@pytest.mark.parametrize("pitch,offset", [(20000, 0), (20003, 0), (20064, 4), (20064, 3), (20001, 1)])
def test_pitch_and_alignment_of_the_logits(
    pitch: int, offset: int, backend_name: str, device: torch.device, generator: torch.Generator
) -> None:
    """Any row pitch, any start: the same row, the same answer."""
    width = 19990
    rows = random_logits((3, width), generator, 300)
    store = torch.full((3 * pitch + offset,), INF, device=device)
    logits = store[offset:].view(3, pitch)[:, :width]
    logits.copy_(rows)
    check(logits, integers([0, 1, 2], device), integers([width, width - 1, width - 2], device), 256, backend_name)


def test_pitched_ids(backend_name: str, device: torch.device, generator: torch.Generator) -> None:  # T25 T15
    logits = random_logits((4, 2500), generator).to(device)
    got = choose(logits, *whole(logits), 2048, backend_name, pad=128)
    assert torch.equal(got, oracle(logits, *whole(logits), 2048))


def test_ids_are_local_to_the_row(backend_name: str, device: torch.device, generator: torch.Generator) -> None:  # T27
    """Two requests of 40 and 37 packed keys: the second one's ids start at 0 again, and -1 is never shifted."""
    logits = random_logits((2, 77), generator).to(device)
    got = check(logits, integers([0, 40], device), integers([40, 77], device), 50, backend_name)
    assert got[1].max() == 36
    assert got[1, 37:].tolist() == [-1] * 13


def test_rows_apart_and_together(backend_name: str, device: torch.device, generator: torch.Generator) -> None:  # T16
    logits = random_logits((3, 9000), generator, 20).to(device)
    ks, ke = integers([0, 3000, 3010], device), integers([3000, 3010, 8010], device)
    together = check(logits, ks, ke, 2048, backend_name)
    for m in range(3):
        alone = choose(logits[m : m + 1], ks[m : m + 1], ke[m : m + 1], 2048, backend_name)
        assert torch.equal(alone[0], together[m])


def test_ties_take_the_lowest_ids(backend_name: str, device: torch.device) -> None:  # T18
    logits = torch.tensor([[3.0, 3.0, 1.0], [1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], device=device)
    assert choose(logits, *whole(logits), 2, backend_name).tolist() == [[0, 1], [1, 2], [0, 1]]


def test_tie_heavy_rows_in_any_buffer_and_batch(
    backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T10
    row = random_logits((1, 8000), generator, 8).to(device)
    right = oracle(row, *whole(row), 512)[0]
    widths = [8192, 12288, 16384, 40000] + ([1 << 20] if device.type == "cuda" else [])
    for width in widths:
        logits = torch.full((1, width), INF, device=device)
        logits[:, :8000] = row
        got = choose(logits, integers([0], device), integers([8000], device), 512, backend_name)
        assert torch.equal(got[0], right), width
    for rows in (1, 5) if device.type == "cpu" else (1, 64, 65):
        logits = row.expand(rows, -1).contiguous()
        assert torch.equal(choose(logits, *whole(logits), 512, backend_name), right.expand(rows, -1))


def _tie_rows(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, int, list[int], int]:
    """Tie-heavy logits, k, a split of the rows into four shards, and how often to launch."""
    gpu = device.type == "cuda"
    rows, width, topk = (4098, 16384, 2048) if gpu else (18, 3000, 300)
    logits = torch.randint(0, 64, (rows, width), generator=generator).float().to(device)
    return logits, topk, [2049, 849, 651, 549] if gpu else [9, 4, 3, 2], 100 if gpu else 2


def test_relaunches_shards_and_slices_agree(
    backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T06 T07 T08 T11 T29 T31
    logits, topk, shards, launches = _tie_rows(device, generator)
    ks, ke = whole(logits)
    once = choose(logits, ks, ke, topk, backend_name)
    right = oracle(logits[:4], ks[:4], ke[:4], topk)
    assert torch.equal(once[:4], right)
    for _ in range(launches):
        assert torch.equal(choose(logits, ks, ke, topk, backend_name), once)
    eighth = -(-len(logits) // 8)
    for sizes in (shards, [eighth] * 8):
        start = 0
        for size in sizes:
            part = slice(start, min(start + size, len(logits)))
            assert torch.equal(choose(logits[part], ks[part], ke[part], topk, backend_name), once[part])
            start += size


def test_no_rows_and_no_keys(backend_name: str, device: torch.device) -> None:
    empty = torch.empty(0, dtype=torch.int32, device=device)
    assert pi.top_k_per_row(torch.empty(0, 9, device=device), empty, empty, 4, backend=backend_name).shape == (0, 4)
    none = torch.empty(2, 0, device=device)
    assert (choose(none, integers([0, 0], device), integers([0, 5], device), 4, backend_name) == -1).all()


@pytest.mark.gpu
def test_rows_longer_than_float32_counts(backend_name: str, device: torch.device, generator: torch.Generator) -> None:
    """2^24 + 100,000 keys of which all but the last few tie: counts must be integers."""
    width = (1 << 24) + 100_000
    logits = torch.zeros(2, width, device=device)
    logits[0, -5:] = 1.0
    logits[1] = torch.randn(width, device=device)
    got = choose(logits, *whole(logits), 2048, backend_name)
    assert got[0].tolist() == [*range(2043), *range(width - 5, width)]
    kth = logits[1].topk(2048).values[-1]
    assert torch.equal(got[1], (logits[1] >= kth).nonzero()[:2048, 0].to(torch.int32).cpu())


@pytest.mark.gpu
def test_row_offsets_beyond_32_bits(backend_name: str, device: torch.device) -> None:  # T20
    logits = torch.zeros(2050, 1 << 20, device=device)
    peaks = torch.arange(2050, device=device) * 500
    logits[torch.arange(2050, device=device), peaks] = 1.0
    ks = torch.zeros(2050, dtype=torch.int32, device=device)
    got = pi.top_k_per_row(logits, ks, torch.full_like(ks, 1 << 20), 1, backend=backend_name)
    assert torch.equal(got[:, 0], peaks.to(torch.int32))


@pytest.mark.gpu
def test_replay_follows_lengths_and_survives_other_allocations(
    backend_name: str, device: torch.device, generator: torch.Generator
) -> None:  # T24 V11 V13
    if backend_name == "reference":
        pytest.skip("the reference allocates and is not meant for capture")
    logits = random_logits((8, 40000), generator).to(device)
    ks = torch.zeros(8, dtype=torch.int32, device=device)
    ke = torch.full_like(ks, 100)
    out = torch.full((8, 512), POISON, dtype=torch.int32, device=device)
    pi.top_k_per_row(logits, ks, ke, 512, out=out, backend=backend_name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pi.top_k_per_row(logits, ks, ke, 512, out=out, backend=backend_name)
    torch.empty(1 << 28, device=device).fill_(NAN)
    torch.cuda.empty_cache()
    for length in (100, 5000, 40000, 513):
        ke.fill_(length)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out.cpu(), oracle(logits, ks, ke, 512)), length

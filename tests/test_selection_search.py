"""The search in registers: the k-th best of any scores, from any guess, and the rows that are chosen with it.

Small kernels of these tests call the device functions. They run in Triton's interpreter, on a GPU and under the
executor; a process that can do none of these skips them.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from portable_indexer.registry import get_backend

triton = pytest.importorskip("triton", reason="the search is a Triton function")
tl = pytest.importorskip("triton.language")
pytest.importorskip("hypothesis", reason="random rows come from hypothesis")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from portable_indexer.backends.triton_common import runtime, selection  # noqa: E402
from portable_indexer.backends.triton_common import selection_keys as keys  # noqa: E402
from portable_indexer.backends.triton_common.selection_search import find_cut  # noqa: E402
from portable_indexer.backends.triton_common.selection_short import choose_row  # noqa: E402

POISON = 2**31 - 1
INF = float("inf")
NAN = float("nan")
LARGEST = 3.4028234663852886e38
LEAST = 2.0**-149
SPECIAL = [0.0, -0.0, LEAST, -LEAST, 2.0**-126, LARGEST, -LARGEST, INF, -INF, NAN, 1.0, -1.0]
PLACES = 64

Row = list[float]


@triton.jit
def _cuts(scores, lengths, limits, guesses, wanted, cuts, ties, BLOCK: tl.constexpr, EMPTY: tl.constexpr):
    """One program a row of BLOCK places: the keys that reach the row's limit are searched for the k-th best."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    limit = tl.load(limits + row)
    empty = float("nan") if EMPTY else float("-inf")
    found = tl.load(scores + row * BLOCK + place, mask=place < length, other=empty)
    total = length
    if limit > float("-inf"):
        found = tl.where(found >= limit, found, empty)
        total = tl.sum((found >= limit).to(tl.int32), axis=0)
    left = tl.load(guesses + row * 3)
    trial = tl.load(guesses + row * 3 + 1)
    right = tl.load(guesses + row * 3 + 2)
    cut, equals = find_cut(found, keys.image(limit), total, left, trial, right, tl.load(wanted + row))
    tl.store(cuts + row, keys.score(cut))
    tl.store(ties + row, equals)


@triton.jit(do_not_specialize=["pitch", "out_pitch", "k"])
def _rows(
    scores, starts, lengths, out, pitch, out_pitch, k,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """One program a row: its keys begin at column ``starts``; ids are columns."""
    row = tl.program_id(0)
    start = tl.load(starts + row)
    row_keys = scores + row * pitch + start
    choose_row(row_keys, out + row * out_pitch, tl.load(lengths + row), start, k, BLOCK, PARTS, PIECE, SAMPLE)


@pytest.fixture(autouse=True)
def _runs_here(device: torch.device) -> None:
    if not runtime.runs_on(device.type):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1: Triton runs no kernels on CPU tensors in this process")


@contextmanager
def ends() -> Iterator[None]:
    """A search without end fails, instead of holding up the suite; in this process, that is: not on a GPU."""

    def stop(*_: object) -> None:
        raise TimeoutError("the search does not end")

    held = signal.signal(signal.SIGALRM, stop)
    signal.alarm(90)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, held)


def as_score(value: float) -> float:
    return -INF if value != value else value


def best(row: Row, k: int) -> list[int]:
    """Places of the k best, by a sort of Python numbers: the higher score, then the lower place."""
    return sorted(sorted(range(len(row)), key=lambda i: (-as_score(row[i]), i))[:k])


def named(row: Row, cut: float, ties: int) -> list[int]:
    """Places of the keys that a cut names."""
    if ties == 0:
        return [i for i, value in enumerate(row) if value >= cut]
    equal = [i for i, value in enumerate(row) if as_score(value) == cut][:ties]
    return sorted([i for i, value in enumerate(row) if value > cut] + equal)


def _bits(word: int) -> float:
    return float(struct.unpack("f", struct.pack("I", word & 0xFFFFFFFF))[0])


ANY = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.integers(0, 2**32 - 1).map(_bits))


@st.composite
def rows(draw: st.DrawFn, least: int, most: int) -> Row:
    """Scores of one kind: few different ones, mostly none, neighbours, powers, zeros of both signs, or any at all."""
    length = draw(st.integers(least, most))
    random = draw(st.randoms(use_true_random=False))
    kind = draw(st.sampled_from(["few", "missing", "neighbours", "powers", "zeros", "normal", "bits"]))
    if kind == "few":
        palette = draw(st.lists(ANY, min_size=1, max_size=6))
        return [random.choice(palette) for _ in range(length)]
    if kind == "missing":
        return [random.choice([NAN, -INF, NAN, -INF, 1.0, -LARGEST][random.randrange(5) :]) for _ in range(length)]
    if kind == "neighbours":
        base, width = random.getrandbits(32), random.choice([2, 5, 200])
        return [_bits(base + random.randrange(width)) for _ in range(length)]
    if kind == "powers":
        return [random.choice([-1.0, 1.0]) * 2.0 ** random.randrange(-149, 128) for _ in range(length)]
    if kind == "zeros":
        near = [0.0, -0.0, LEAST, -LEAST][: random.choice([2, 4])]
        return [random.choice(near) for _ in range(length)]
    if kind == "normal":
        scale = random.choice([1e-40, 1.0, 1e30])
        values = torch.tensor([random.gauss(0, scale) for _ in range(length)], dtype=torch.float32)
        return values.tolist()
    return [_bits(random.getrandbits(32)) for _ in range(length)]


@st.composite
def searches(draw: st.DrawFn) -> tuple[Row, int, float, Row]:
    """Scores, k, a limit that at least k of them reach, and a guess of three numbers, however poor."""
    row = draw(rows(2, PLACES))
    k = draw(st.one_of(st.integers(1, len(row) - 1), st.sampled_from([1, len(row) - 1])))
    reached = sorted((as_score(value) for value in row), reverse=True)
    limit = draw(st.sampled_from([-INF, reached[k - 1], reached[-1], reached[draw(st.integers(k - 1, len(row) - 1))]]))
    if limit == 0:
        limit = draw(st.sampled_from([0.0, -0.0]))
    near = draw(st.sampled_from([-INF, NAN, *row]))
    guess = draw(st.sampled_from([[near, near, near], sorted(map(as_score, row[:2])) * 2, None]))
    return row, k, limit, draw(st.lists(ANY, min_size=3, max_size=3)) if guess is None else guess[:3]


def batches(one: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(one, min_size=6, max_size=6)


@settings(max_examples=12, deadline=None, database=None)
@given(batch=batches(searches()), nan_in_empty_places=st.booleans())
# Both zeros at the cut; a key that is missing next to them; no key but NaN; -inf among them.
@example(
    batch=[
        ([0.0, -0.0, -0.0, 0.0, -1.0, 1.0], 3, -INF, [-1.0, 0.0, 1.0]),
        ([0.0, -0.0, 0.0, -LEAST, -LEAST, -1.0], 4, -INF, [-1.0, 0.0, 1.0]),
        ([0.0, -0.0, LEAST, 2.0], 3, -0.0, [NAN, NAN, NAN]),
        ([-0.0, -0.0, 1.0, -5.0], 2, -1.0, [0.0, 0.0, 0.0]),
        ([NAN] * 5, 2, -INF, [0.0, 0.0, 0.0]),
        ([NAN, -INF, 1.0, -INF, NAN], 2, -INF, [-INF, 0.0, INF]),
        ([LARGEST, -LARGEST, INF, INF, -LARGEST, LARGEST], 3, -INF, [-LARGEST, 0.0, LARGEST]),
    ],
    nan_in_empty_places=False,
)
# NaN counts as -inf, in a row without empty places or with NaN in them: the lowest places are taken.
@example(
    batch=[
        ([NAN, -INF, 1.0, NAN], 2, -INF, [0.0, 1.0, 2.0]),
        ([NAN, NAN, 1.0, 2.0], 3, -INF, [0.0, 1.0, 2.0]),
        ([1.0, NAN, -INF, NAN, -INF, 2.0], 4, -INF, [1.0, 1.0, 1.0]),
        ([NAN, -INF, NAN, NAN, 1.0, 2.0], 4, -INF, [NAN, NAN, NAN]),
        ([-INF, NAN] * (PLACES // 2), PLACES // 2, -INF, [NAN, 0.0, INF]),
    ],
    nan_in_empty_places=True,
)
def test_the_cut_names_the_k_best_keys(
    batch: list[tuple[Row, int, float, Row]], nan_in_empty_places: bool, device: torch.device
) -> None:  # T01 T02 T06
    count = len(batch)
    scores = torch.full((count, PLACES), INF)
    for place, (row, *_) in zip(scores, batch, strict=True):
        place[: len(row)] = torch.tensor(row)
    lengths, wanted = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([len(row) for row, *_ in batch], [k for _, k, _, _ in batch])
    )
    limits = torch.tensor([limit for _, _, limit, _ in batch], device=device)
    guesses = torch.tensor([guess for *_, guess in batch], device=device)
    cuts = torch.full((count,), NAN, device=device)
    ties = torch.full((count,), POISON, dtype=torch.int32, device=device)
    with ends():
        _cuts[(count,)](
            scores.to(device), lengths, limits, guesses, wanted, cuts, ties, BLOCK=PLACES, EMPTY=nan_in_empty_places
        )
    for (row, k, _, _), cut, equals in zip(batch, cuts.tolist(), ties.tolist(), strict=True):
        assert 0 <= equals <= k
        assert named(row, cut, equals) == best(row, k), (cut, equals)


@settings(max_examples=5, deadline=None, database=None)
@given(
    batch=st.lists(st.tuples(rows(65, 512), st.integers(0, 40)), min_size=3, max_size=3), k=st.sampled_from([1, 20, 64])
)
# Ties at the cut lie on both sides of the borders of lines, parts and pieces, and better keys behind the last of them.
@example(
    batch=[
        ([0.0] * 200, 7),
        ([-0.0, 0.0, -1.0] * 100, 1),
        (([-1.0] * 7 + [0.0]) * 60 + [1.0], 40),
        ([NAN] * 31 + [-INF] * 250 + [1.0] * 3, 33),
    ],
    k=40,
)
def test_rows_in_registers(batch: list[tuple[Row, int]], k: int, device: torch.device) -> None:  # T06 T18 T25
    """Exactly k ids, ascending; neither the columns beside a row's nor the slots behind k matter or change."""
    width = 560
    scores = torch.full((len(batch), width), INF)
    for place, (row, start) in zip(scores, batch, strict=True):
        place[start : start + len(row)] = torch.tensor(row)
    starts, lengths = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([start for _, start in batch], [len(row) for row, _ in batch])
    )
    out = torch.full((len(batch), k + 5), POISON, dtype=torch.int32, device=device)
    with ends():
        _rows[(len(batch),)](
            scores.to(device), starts, lengths, out, width, k + 5, k, BLOCK=512, PARTS=2, PIECE=128, SAMPLE=64
        )
    for (row, start), ids in zip(batch, out.tolist(), strict=True):
        assert ids == [i + start for i in best(row, k)] + [POISON] * 5


@pytest.mark.parametrize("levels", [2, 400])
def test_short_rows_of_wide_matrices(
    levels: int, device: torch.device, generator: torch.Generator
) -> None:  # T10 T12 T16
    """Rows of any length side by side, in registers or by candidates: the ids of each row alone in a narrow matrix."""
    choice = selection.SelectionChoice(
        short_keys=1024, short_keys_per_warp=256, short_piece_per_warp=64, short_sample=64, tile_keys=1024,
        mark_block=512, finish_chunk=128, choose_piece=128, spare_programs=2,
    )  # fmt: skip
    width, topk, pitch = 3001, 100, 3003
    assert selection.Plan(choice, width, topk).short_row == 1024
    starts, counts = [0, 1, 1700, 2950, 33, 7], [3001, 1024, 513, 51, 1025, 100]
    store = torch.full((len(starts) * pitch,), INF)
    logits = store.view(-1, pitch)[:, :width]
    for row, start, length in zip(logits, starts, counts, strict=True):
        row.fill_(NAN)
        values = torch.randint(-levels, levels + 1, (length,), generator=generator).float() / 4
        values[torch.rand(length, generator=generator) < 0.1] = -0.0
        values[torch.rand(length, generator=generator) < 0.05] = NAN
        row[start : start + length] = values
    ks = torch.tensor(starts, dtype=torch.int32)
    ke = ks + torch.tensor(counts, dtype=torch.int32)
    right = torch.full((len(starts), topk), POISON, dtype=torch.int32)
    get_backend("reference").top_k_per_row(logits, ks, ke, topk, right)

    def chosen(m: slice, begin: int, end: int) -> torch.Tensor:
        part = store.to(device).view(-1, pitch)[m, begin:end]
        plan = selection.plan_for(choice, end - begin, topk)
        scratch = [
            torch.full(shape, 0x5A, dtype=torch.int32, device=device).view(dtype) for shape, dtype in plan.scratch(6)
        ]
        out = torch.full((part.shape[0], topk + 3), POISON, dtype=torch.int32, device=device)
        first, last = (ks[m] - begin).to(device), (ke[m] - begin).to(device)
        selection.select_rows(part, first, last, topk, out[:, :topk], choice, scratch)
        assert (out[:, topk:] == POISON).all()
        return out[:, :topk].cpu()

    with ends():
        assert torch.equal(chosen(slice(0, 6), 0, width), right)
        for m in (1, 2, 5):
            alone = chosen(slice(m, m + 1), starts[m], starts[m] + counts[m])
            assert torch.equal(alone[0], right[m])

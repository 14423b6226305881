"""The exchange over NCCL or RCCL, and, without a GPU, which collectives it would call there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from portable_indexer.exchange import gather

SCRIPT = Path(__file__).resolve().parents[1] / "ci" / "nccl_two_ranks.py"


def run_script(*options: str) -> None:
    """The script kills its ranks after 200 s; nothing outlives it."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check-only", "--timeout", "200", *options],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout + done.stderr


def test_script_on_cpu_ranks() -> None:
    run_script("--device", "cpu", "--ranks", "3")


@pytest.mark.gpu
def test_two_ranks_on_whatever_gpus_there_are() -> None:  # X01 X03 X05 X08 X14
    run_script("--ranks", "2")


@pytest.mark.multi_gpu
def test_one_rank_on_each_gpu_and_in_graphs() -> None:  # X01 X03 X05 X07 X08 X09 X13
    run_script("--graph")


class Calls:
    """Stands for torch.distributed: notes each collective and the addresses that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wanted: torch.Tensor) -> None:
        self.names: list[str] = []
        self.wanted = wanted  # what the library would deliver, flat
        monkeypatch.setattr(dist, "all_gather", self.all_gather)
        monkeypatch.setattr(gather, "all_gather_even", self.all_gather_even)
        monkeypatch.setattr(dist, "broadcast", lambda *_, **__: pytest.fail("one broadcast after another"))

    def all_gather(self, views: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        self.names.append("all_gather")
        assert len({len(view) for view in views}) > 1, "the list form copies views of one length"
        assert any(own is view for view in views)
        offset = views[0].storage_offset()
        for view, part in zip(views, self.wanted.split([len(view) for view in views]), strict=True):
            assert view.storage_offset() == offset, "views follow each other"
            offset += len(view)
            view.copy_(part)

    def all_gather_even(self, flat: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        self.names.append("all_gather_even")
        assert (own.data_ptr() - flat.data_ptr()) % (len(own) * 4) == 0 and len(flat) % len(own) == 0
        if len(flat) == len(self.wanted):
            flat.copy_(self.wanted)


@pytest.mark.parametrize(
    ("sizes", "pitch", "call"),
    [
        ([3, 5, 1], 4, "all_gather"),
        ([0, 5, 0], 4, "all_gather"),
        ([3, 5, 1], 7, "all_gather"),
        ([4, 4, 4], 4, "all_gather_even"),
        ([4, 4, 4], 7, "all_gather_even"),
    ],
)
def test_collectives_of_nccl(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], pitch: int, call: str
) -> None:  # X01 X02 X03 X08
    """Uneven views in one grouped call, equal ones in one even call, both in place."""
    total = sum(sizes)
    wanted = torch.randint(0, 1000, (total, 4), dtype=torch.int32)
    for rank in range(len(sizes)):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        storage = torch.full((total, pitch), -1, dtype=torch.int32)
        storage[own, :4] = wanted[own]
        rows = storage[:, :4]
        staging = None if pitch == 4 else torch.full((total * 4,), -2, dtype=torch.int32)
        calls = Calls(monkeypatch, wanted.view(-1))
        group: Any = None
        gather.gather(gather.Plan(group, rank, tuple(sizes), 0, rows, staging, "grouped", "nccl"))
        assert calls.names == [call]
        assert torch.equal(storage[:, :4], wanted) and (storage[:, 4:] == -1).all()


def test_very_uneven_padded_shards_go_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:  # X08 M11
    """The rounds come from the sizes alone, so that every rank enters as many collectives."""
    for sizes in ([100, 0, 0, 0], [50, 20, 15, 15], [26, 25, 25, 24]):
        need = 4 * min(max(sizes), gather._block_limit(100, 4))
        counts = set()
        for rank in range(4):
            calls = Calls(monkeypatch, torch.zeros(0, dtype=torch.int32))
            rows, staging = torch.zeros(100, 2, dtype=torch.int32), torch.zeros(need * 2, dtype=torch.int32)
            group: Any = None
            gather.gather(gather.Plan(group, rank, tuple(sizes), 0, rows, staging, "padded", "nccl"))
            counts.add(len(calls.names))
        assert counts == {-(-max(sizes) // 50)}
        assert need * 2 * 4 <= gather.staging_bytes(100, 2, 4, "padded")

"""What one rank of `portable-indexer demo` does: each step sharded and replicated, compared byte for byte."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from portable_indexer.api import index_topk
from portable_indexer.backend import Problem
from portable_indexer.cli._processes import Meeting
from portable_indexer.device import detect
from portable_indexer.metadata import IndexerMetadataBuilder
from portable_indexer.registry import resolve
from portable_indexer.sharding import PrefillRowShard, balanced_prefill_row_shard
from portable_indexer.steps import Step
from portable_indexer.warmup import warmup

# Stands in ids that nobody may write; no id is negative but -1.
POISON = -0x5A5A5A5B
# Steps are padded to a multiple of this many rows, as an engine pads them to the sizes of its graphs.
ROW_PADDING = 64
# Every eighth key repeats the one before, so that exact ties straddle the k-th place.
TIE_STRIDE = 8
_KEY_BLOCK = 1 << 18  # keys drawn at a time, which bounds their float32 copy


@dataclass(frozen=True)
class Job:
    """What all ranks run; `gpus` is 0 for the CPU."""

    steps: tuple[Step, ...]
    num_heads: int
    head_dim: int
    topk: int
    compress_ratio: int
    seed: int
    gpus: int
    backend: str | None

    def keys(self, step: Step) -> int:
        """Packed keys of all requests of a step."""
        return sum(seq_len // self.compress_ratio for seq_len in step.seq_lens)

    def sizes(self, step: Step, ranks: int) -> list[int]:
        """Prefill rows of each rank: the plan, which is always followed here."""
        plan = balanced_prefill_row_shard(step.prefill_seq_lens, step.prefill_query_lens, self.compress_ratio, ranks)
        return [step.num_prefill_rows] if plan is None else plan


@dataclass(frozen=True)
class Ready:
    """A rank's first message: where it runs and with what."""

    device: str
    backend: str


@dataclass(frozen=True)
class Outcome:
    """One step on one rank; `faults` is empty where all was as it must be."""

    position: int
    sharded_s: float
    replicated_s: float
    digest: str  # of the replicated ids
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Inputs:
    """Operands of one step: all rows, decode first, padding last."""

    q: torch.Tensor  # [padded rows, H, D] fp8
    kv: tuple[torch.Tensor, torch.Tensor]  # [N, D] fp8, [N] float32
    weights: torch.Tensor  # [padded rows, H] float32
    ks: torch.Tensor  # [padded rows] int32
    ke: torch.Tensor  # [padded rows] int32

    def rows(
        self, part: slice
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of `index_topk` for some of the rows."""
        return self.q[part], self.kv, self.weights[part], self.ks[part], self.ke[part]


def padded_rows(step: Step) -> int:
    """Rows of a step with its padding: always at least one row of it, so that there is a tail to guard."""
    return (step.num_rows // ROW_PADDING + 1) * ROW_PADDING


def run_rank(meeting: Meeting, tell: Callable[[Any], None], job: Job) -> None:
    """The whole job of one rank; tells `Ready`, then an `Outcome` for each step."""
    device = torch.device("cpu")
    if job.gpus:
        device = torch.device("cuda", meeting.rank % job.gpus)
        torch.cuda.set_device(device)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // meeting.ranks))
    meeting.init(device if "nccl" in meeting.group else None)
    found = detect(device)
    fp8 = torch.float8_e4m3fnuz if found.fp8 == "fnuz" else torch.float8_e4m3fn
    keys = max(map(job.keys, job.steps))
    problem = Problem("index_topk", device, 1, keys, job.num_heads, job.head_dim, job.topk, fp8, fp8)
    chosen = resolve(found, problem, job.backend)
    builder = IndexerMetadataBuilder(
        max(map(padded_rows, job.steps)),
        max(len(step.seq_lens) for step in job.steps),
        keys,
        compress_ratio=job.compress_ratio,
        device=device,
        backend=job.backend,
    )
    warmup(job.num_heads, job.head_dim, job.topk, device=device, backend=job.backend)
    worker = _Worker(meeting, job, device, fp8, builder)
    # Untimed: connections are made and memory is taken at the first use.
    pick = max if job.gpus else min
    worker.run(0, pick(job.steps, key=lambda step: step.num_rows))
    tell(Ready(found.name or found.product or found.arch, chosen.name))
    for position, step in enumerate(job.steps):
        tell(worker.run(position, step))
    worker.meet()
    dist.destroy_process_group()


def _digest(ids: torch.Tensor) -> str:
    held = ids.cpu().contiguous()
    # Not through numpy, which torch does not need.
    return hashlib.sha256(ctypes.string_at(held.data_ptr(), held.nbytes)).hexdigest()[:16]


class _Worker:
    def __init__(
        self,
        meeting: Meeting,
        job: Job,
        device: torch.device,
        fp8: torch.dtype,
        builder: IndexerMetadataBuilder,
    ) -> None:
        self.meeting, self.job, self.device, self.fp8, self.builder = meeting, job, device, fp8, builder

    def meet(self) -> None:
        """Wait for this device and for all ranks, so that times start together."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))  # on the host: gloo is in the group with either kind of device

    def run(self, position: int, step: Step) -> Outcome:
        job = self.job
        inputs = self._inputs(step)
        shard = PrefillRowShard(step.num_decode_rows, tuple(job.sizes(step, self.meeting.ranks)), self.meeting.rank)
        shape = (padded_rows(step), job.topk)
        ids = torch.full(shape, POISON, dtype=torch.int32, device=self.device)
        alone = torch.full(shape, POISON, dtype=torch.int32, device=self.device)
        decode, real = slice(0, step.num_decode_rows), slice(0, step.num_rows)

        def sharded() -> None:
            index_topk(*inputs.rows(slice(None)), job.topk, out=ids, shard=shard, backend=job.backend)

        def decoded() -> None:
            index_topk(*inputs.rows(decode), job.topk, out=ids[decode], backend=job.backend)

        def replicated() -> None:
            index_topk(*inputs.rows(real), job.topk, out=alone[real], backend=job.backend)

        sharded_s = self._seconds(sharded)
        faults = [
            f"{name} rows were written by the sharded call"
            for name, part in (("decode", ids[decode]), ("padded", ids[step.num_rows :]))
            if not bool((part == POISON).all())
        ]
        # Decode rows belong to every rank, in both ways of running the step.
        sharded_s += self._seconds(decoded) if step.num_decode_rows else 0.0
        replicated_s = self._seconds(replicated)
        if not torch.equal(ids, alone):
            rows = (ids != alone).any(dim=1).nonzero().flatten().tolist()
            faults.append(f"{len(rows)} rows differ from the replicated answer, the first is row {rows[0]}")
        if bool((alone[real] == POISON).any()):
            faults.append("the replicated answer has ids that were never written")
        return Outcome(position, sharded_s, replicated_s, _digest(alone[real]), tuple(faults))

    def _seconds(self, call: Callable[[], None]) -> float:
        self.meet()
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _inputs(self, step: Step) -> Inputs:
        """Random operands from the seed and the step alone, hence the same on every rank and for any ranks."""
        job, rows, keys = self.job, padded_rows(step), self.job.keys(step)
        source = torch.Generator(self.device).manual_seed(job.seed * 1_000_003 + step.index)
        k = torch.empty(keys, job.head_dim, dtype=self.fp8, device=self.device)
        for first in range(0, keys, _KEY_BLOCK):
            k[first : first + _KEY_BLOCK] = self._normal(source, min(_KEY_BLOCK, keys - first), job.head_dim)
        scale = torch.rand(keys, generator=source, device=self.device) + 0.5
        pairs = keys // TIE_STRIDE
        # Bytes: not every device copies fp8 through strides.
        raw = k.view(torch.uint8)
        raw[1::TIE_STRIDE][:pairs] = raw[::TIE_STRIDE][:pairs].clone()
        scale[1::TIE_STRIDE][:pairs] = scale[::TIE_STRIDE][:pairs].clone()
        q = torch.empty(rows, job.num_heads, job.head_dim, dtype=self.fp8, device=self.device)
        for first in range(0, rows, 1024):
            count = min(1024, rows - first)
            q[first : first + count] = self._normal(source, count, job.num_heads, job.head_dim)
        weights = torch.randn(rows, job.num_heads, generator=source, device=self.device)
        ks, ke = self._bounds(step, rows)
        return Inputs(q, (k, scale), weights, ks, ke)

    def _normal(self, source: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, device=self.device).to(self.fp8)

    def _bounds(self, step: Step, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key bounds of every row: each request's keys are packed behind those of the one before."""
        starts: Sequence[int] = [0, *accumulate(step.query_lens)]
        lens = step.seq_lens
        metadata = self.builder.build(
            torch.tensor(starts, dtype=torch.int32, device=self.device),
            torch.tensor(lens, dtype=torch.int32, device=self.device),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            num_tokens=rows,
            # One chunk: `index_topk` keeps the logits budget by itself.
            logits_budget=1 << 62,
        )
        return metadata.cu_seqlen_ks, metadata.cu_seqlen_ke

"""When to shard the rows of a step: by predicted time, from replicated integers only."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import InitVar, asdict, dataclass
from typing import Any, Literal, get_args

from portable_indexer.tuning.costs import CHUNK_BYTES, Costs, Exchange, chunks_of, largest_shard, width_of

Mode = Literal["auto", "on", "off"]
ENVIRONMENT = "PORTABLE_INDEXER_SHARD"


@dataclass(frozen=True)
class Estimate:
    """Predicted device times of one layer's indexer in a step, in seconds.

    `sharded_s` is the slowest rank's own part and the exchange; it and `exchange_s` are None where the exchange
    among that many ranks is not known. `launch_s` is what the host needs to launch the step's kernels,
    `exchange_launch_s` what it needs for the exchange, None where that is not known.
    """

    replicated_s: float
    sharded_s: float | None
    exchange_s: float | None
    launch_s: float
    exchange_launch_s: float | None = None

    @property
    def saving_s(self) -> float | None:
        """What sharding saves if the device waits for the host wherever the host is slower; None if unknown."""
        if self.sharded_s is None or self.exchange_s is None:
            return None
        # Unknown, the exchange's launch counts like the exchange itself.
        launch = self.launch_s + (self.exchange_s if self.exchange_launch_s is None else self.exchange_launch_s)
        return max(self.replicated_s, self.launch_s) - max(self.sharded_s, launch)


@dataclass(frozen=True)
class ShardPolicy:
    """Decides for each step whether its prefill rows are sharded.

    Attributes:
        mode: "auto" compares predicted times, "on" always shards, "off" never does. The environment variable
            PORTABLE_INDEXER_SHARD overrides it on the rank whose policy the others take over (see `agree`).
        min_rows: where given, "auto" shards exactly the steps with at least this many prefill rows, counted
            over the whole step (all requests, all ranks together), and no predicted time is looked at.
        costs: the device's costs; None takes those of this device's tuning data ("off" needs none and looks
            at no device).
        margin: share of the replicated time that sharding must save.
        margin_s: seconds that sharding must save on top.
        imbalance: share by which the slowest rank takes longer than the model's time for the largest shard.
        num_heads, head_dim, topk, compress_ratio: the model's indexer, with so many tokens for each key; `decide`
            takes them from here unless told otherwise.
        chunk_bytes: what the logits of one chunk of rows take; None is what `index_topk` lets them take here
            (PORTABLE_INDEXER_LOGITS_MB, default 512 MiB).

    Raises:
        ValueError: for an unknown mode (also in the environment), a negative margin or a shape below 1.

    "auto" never shards among a number of ranks whose exchange was never measured or derived. A decision uses
    nothing but its arguments and these fields: the same on every rank, whatever memory a rank has free.
    """

    mode: Mode = "auto"
    min_rows: int | None = None
    costs: Costs | None = None
    margin: float = 0.05
    margin_s: float = 20e-6
    imbalance: float = 0.03
    num_heads: int = 64
    head_dim: int = 128
    topk: int = 2048
    compress_ratio: int = 1
    chunk_bytes: int | None = None
    environment: InitVar[bool] = True

    def __post_init__(self, environment: bool) -> None:
        mode: str = os.environ.get(ENVIRONMENT, "").strip().lower() if environment else ""
        origin = f"environment variable {ENVIRONMENT}" if mode else "mode"
        mode = mode or self.mode
        if mode not in get_args(Mode):
            raise ValueError(f"{origin} must be one of auto, on, off, got {mode!r}")
        object.__setattr__(self, "mode", mode)
        if self.min_rows is not None and self.min_rows < 0:
            raise ValueError(f"min_rows must be None or at least 0, got {self.min_rows}")
        for name in ("margin", "margin_s", "imbalance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.chunk_bytes is None:
            from portable_indexer.workspace import logits_budget

            object.__setattr__(self, "chunk_bytes", logits_budget() if environment else CHUNK_BYTES)
        for name in ("num_heads", "head_dim", "topk", "compress_ratio", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.costs is None and mode != "off":
            from portable_indexer.device import detect
            from portable_indexer.tuning import tuning_for

            object.__setattr__(self, "costs", tuning_for(detect()).costs)

    def decide(
        self,
        *,
        rows: int,
        pairs: int,
        tp_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        topk: int | None = None,
        compress_ratio: int | None = None,
    ) -> bool:
        """Whether a step is sharded.

        Args:
            rows: prefill rows (query tokens) of the whole step, decode and padding left out.
            pairs: key-row pairs of those rows, in keys (tokens, compressed entries or pools).
            tp_size: ranks that would share the rows.
            num_heads, head_dim, topk, compress_ratio: this model's, where they differ from the policy's own.
        """
        if self.mode == "off" or tp_size < 2 or rows < 1:
            return False
        if self.mode == "on":
            return True
        if self.min_rows is not None:
            return rows >= self.min_rows
        times = self.estimate(
            rows=rows,
            pairs=pairs,
            tp_size=tp_size,
            num_heads=num_heads,
            head_dim=head_dim,
            topk=topk,
            compress_ratio=compress_ratio,
        )
        saving = times.saving_s
        return saving is not None and saving > self.margin_s + self.margin * times.replicated_s

    def estimate(
        self,
        *,
        rows: int,
        pairs: int,
        tp_size: int,
        num_heads: int | None = None,
        head_dim: int | None = None,
        topk: int | None = None,
        compress_ratio: int | None = None,
    ) -> Estimate:
        """Predicted times of one layer's indexer; arguments as in `decide`."""
        costs = self._costs()
        heads = self.num_heads if num_heads is None else num_heads
        dim = self.head_dim if head_dim is None else head_dim
        width = self.topk if topk is None else topk
        ratio = self.compress_ratio if compress_ratio is None else compress_ratio
        columns = width_of(rows, pairs, ratio)

        def compute(rows: float, pairs: float) -> float:
            chunks = chunks_of(rows, columns, self.chunk_bytes or CHUNK_BYTES)
            score = costs.score_s(rows, pairs, heads, dim, chunks)
            return score + costs.select_s(rows, pairs, columns, width, chunks)

        replicated = compute(rows, pairs)
        exchange = costs.exchange_s(rows, width, tp_size)
        if exchange is None:
            return Estimate(replicated, None, None, costs.launch_s)
        largest = largest_shard(rows, pairs, max(tp_size, 1), ratio)
        own = (1.0 + self.imbalance) * compute(largest, pairs / max(tp_size, 1))
        among = costs.exchange_among(tp_size)
        return Estimate(replicated, own + exchange, exchange, costs.launch_s, among.launch_s if among else None)

    def break_even_rows(self, tp_size: int, context: int = 0) -> int | None:
        """The fewest prefill rows that `decide` shards, None where not even a million are.

        Args:
            tp_size: ranks.
            context: keys of the one request whose last rows these are; at least the rows themselves.
        """

        def chosen(rows: int) -> bool:
            keys = max(context, rows)
            return self.decide(rows=rows, pairs=rows * (2 * keys - rows + 1) // 2, tp_size=tp_size)

        # Few rows never pay for the exchange's latency: the first power of two that is sharded is an upper bound.
        high = next((1 << bits for bits in range(21) if chosen(1 << bits)), None)
        if high is None or high == 1:
            return high
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if chosen(middle) else (middle, high)
        return high

    def to_json(self) -> str:
        """The whole policy as JSON with sorted keys: equal policies give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ShardPolicy:
        """The policy that `to_json` wrote. The environment has no say here: rank 0's policy stays as it is.

        Raises:
            ValueError: if the text is not a policy.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            costs = values.pop("costs")
            if costs is not None:
                exchange = tuple(Exchange(**entry) for entry in costs.pop("exchange"))
                costs = Costs(**costs, exchange=exchange)
            elif values["mode"] != "off":
                raise TypeError("costs are missing")
            return cls(**values, costs=costs, environment=False)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a shard policy: {error!r} in {text[:200]!r}") from error

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def _costs(self) -> Costs:
        if self.costs is None:
            raise ValueError("a policy that is off and was given no costs predicts no time")
        return self.costs

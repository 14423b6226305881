"""Numbers measured or known per device, as data: `<product>.json` here, and one rule for the rest.

A user's own file, written by `portable-indexer tune`, comes first: the one that PORTABLE_INDEXER_TUNING
names, else `<cache>/portable_indexer/<product or architecture>.json`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType
from typing import Any

from portable_indexer.device import Device
from portable_indexer.tuning.costs import Costs, Exchange
from portable_indexer.tuning.store import ENVIRONMENT, TuningError, check, read, user_file

__all__ = ["Costs", "Exchange", "Tuning", "TuningError", "packaged", "tuning_for"]

logger = logging.getLogger("portable_indexer")

# The file that stands in for a product without one, by architecture and then by vendor.
_NEAREST = {"gfx942": "mi300x", "gfx950": "mi355x", "sm_90": "h100", "amd": "mi300x", "nvidia": "h100"}


@dataclass(frozen=True)
class Tuning:
    """A device's numbers.

    Attributes:
        name: the product or rule that the numbers belong to.
        origin: where they came from: a path, "packaged h200.json", or the rule that scaled them.
        costs: what scoring, selection and exchange cost.
        exchange_algorithm: "grouped" (a broadcast for each block) or "padded" (all-gather of padded blocks).
        sources: for each number, "measured", "datasheet" or "reported".
        runs: the measurements behind the measured numbers, with date, versions and the model's error.
    """

    name: str
    origin: str
    costs: Costs
    exchange_algorithm: str
    sources: Mapping[str, str]
    runs: Mapping[str, Mapping[str, Any]]


def tuning_for(device: Device) -> Tuning:
    """The device's tuning: the user's file, else the packaged one, else the nearest one scaled.

    A user's file that cannot be used costs one warning, which says what is wrong with it, and is passed over.
    The rule for products without a file: the file of a product of the same architecture, else of the same
    vendor; scoring rate by compute units, selection by memory bandwidth where both are known. A partition is
    such a product too. On a CPU, and where the number of ranks is unknown, exchange costs are left out, so
    that an automatic policy does not shard.
    """
    user = _user_tuning(device)
    return user if user is not None else _packaged_or_scaled(device)


def packaged(name: str) -> Tuning | None:
    """The numbers that the package ships for a product, None where it ships none."""
    return _packaged(name)


def packaged_content(name: str) -> dict[str, Any] | None:
    """The checked content of the file that the package ships for a product, None where it ships none."""
    path = resources.files("portable_indexer.tuning").joinpath(f"{name}.json")
    if not path.is_file():
        return None
    return check(read(path.read_text(encoding="utf-8"), str(path)), str(path))


@functools.cache
def _packaged(name: str) -> Tuning | None:
    content = packaged_content(name)
    return None if content is None else _tuning(content, f"packaged {name}.json")


def _user_tuning(device: Device) -> Tuning | None:
    path = user_file(device.product or device.arch)
    if path is None or not path.is_file():
        if os.environ.get(ENVIRONMENT, "").strip():
            _warn_once(f"{ENVIRONMENT}: no file {path}; the package's own numbers are used")
        return None
    try:
        content = check(read(path.read_text(encoding="utf-8"), str(path)), str(path))
        if content["arch"] != device.arch:
            raise TuningError(f"{path}: measured on {content['arch']}, this device is {device.arch}")
    except (OSError, TuningError) as error:
        _warn_once(f"tuning file passed over: {error}; run `portable-indexer tune` to write a new one")
        return None
    tuning = _tuning(content, str(path))
    base = _packaged_or_scaled(device)
    known = {entry.ranks for entry in tuning.costs.exchange}
    # A single-rank run measures no exchange: keep what was known about it.
    rest = tuple(entry for entry in base.costs.exchange if entry.ranks not in known)
    merged = tuple(sorted(tuning.costs.exchange + rest, key=lambda entry: entry.ranks))
    sources = {**{k: v for k, v in base.sources.items() if k.startswith("exchange.")}, **tuning.sources}
    return replace(tuning, costs=replace(tuning.costs, exchange=merged), sources=MappingProxyType(sources))


def _tuning(content: Mapping[str, Any], origin: str) -> Tuning:
    numbers = content["numbers"]
    scalars = {name: float(entry["value"]) for name, entry in numbers.items() if "." not in name}
    ranks = sorted({int(name.split(".")[1]) for name in numbers if name.startswith("exchange.")})

    def number(name: str) -> float | None:
        return float(numbers[name]["value"]) if name in numbers else None

    exchange = tuple(
        Exchange(
            r,
            float(numbers[f"exchange.{r}.latency_s"]["value"]),
            float(numbers[f"exchange.{r}.bandwidth"]["value"]),
            number(f"exchange.{r}.launch_s"),
        )
        for r in ranks
    )
    return Tuning(
        name=content["product"],
        origin=origin,
        costs=Costs(**scalars, exchange=exchange),
        exchange_algorithm=content["choices"]["exchange_algorithm"]["value"],
        sources=MappingProxyType({name: entry["source"] for name, entry in numbers.items()}),
        runs=MappingProxyType(dict(content["runs"])),
    )


def _packaged_or_scaled(device: Device) -> Tuning:
    own = _packaged(device.product) if device.product else None
    if own is not None and not _is_share(device):
        return own
    return own_or_nearest(device, own)


def _is_share(device: Device) -> bool:
    """Whether the device is a partition of its product, with a share of its units."""
    from portable_indexer._products import product_named

    product = product_named(device.product or "")
    return product is not None and device.units is not None and device.units < 0.9 * product.units


def own_or_nearest(device: Device, own: Tuning | None) -> Tuning:
    """The rule: nearest product's numbers, scaled by units and bandwidth."""
    from portable_indexer._products import product_named

    name = own.name if own else _NEAREST.get(device.arch) or _NEAREST.get(device.vendor, "h100")
    base = own or _packaged(name)
    product = product_named(name)
    if base is None or product is None:
        raise TuningError(f"the package lacks {name}.json")
    costs, how = base.costs, []
    if device.vendor == "cpu":
        # Not worth a rule: exchange is left out, so "auto" stays replicated.
        return replace(base, name="cpu", origin="rule: no numbers for a CPU", costs=replace(costs, exchange=()))
    if device.units is not None and device.units != product.units:
        ratio = product.units / device.units
        costs = replace(costs, score_flops=costs.score_flops / ratio, score_pair_s=costs.score_pair_s * ratio)
        how.append(f"scoring x {1 / ratio:.3g} by units")
    bandwidth = device.bandwidth
    if bandwidth is not None and _is_share(device) and device.units is not None:
        bandwidth *= device.units / product.units
    if bandwidth is not None and bandwidth != product.bandwidth:
        ratio = product.bandwidth / bandwidth
        costs = replace(costs, select_short_s=costs.select_short_s * ratio, select_pair_s=costs.select_pair_s * ratio)
        how.append(f"selection x {1 / ratio:.3g} by bandwidth")
    if _is_share(device) or device.arch not in _NEAREST:
        costs = replace(costs, exchange=())
        how.append("exchange unknown")
    origin = f"rule: {name} " + (", ".join(how) if how else "as it is")
    if own is None:
        _warn_once(
            f"no tuning numbers for {device.product or device.arch}: using those of {name} "
            f"({origin}); `portable-indexer tune` measures this device"
        )
    return replace(base, name=device.product or device.arch, origin=origin, costs=costs)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)

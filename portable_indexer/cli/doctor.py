"""`portable-indexer doctor`: what is here, how it was found, what is wrong and what to do about it."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from portable_indexer.cli import _node
from portable_indexer.cli._node import Finding

_UNITS = {"memory_bytes": (1e9, "GB"), "bandwidth": (1e12, "TB/s"), "lds_bytes": (1024, "KiB")}


class _Heard(logging.Handler):
    """Keeps what the package warns about while it looks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-self-test", action="store_true", help="do not run a small problem on the backend")


def run(args: argparse.Namespace) -> int:
    """Look, report; exit code 1 if the indexer cannot run here as it should."""
    heard = _Heard()
    logger = logging.getLogger("portable_indexer")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(heard)
    try:
        report, findings = _look(not args.no_self_test)
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagate
    findings += [Finding("warning", message) for message in heard.messages]
    report["findings"] = [vars(finding) for finding in findings]
    report["ok"] = all(finding.level != "error" for finding in findings)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _look(self_test: bool) -> tuple[dict[str, Any], list[Finding]]:
    report: dict[str, Any] = {"versions": _node.versions(), "environment": dict(_node.environment())}
    bus = _node.bus_devices()
    report["pci"] = [f"{address} {vendor:04x}:{device:04x}" for address, vendor, device in bus]
    findings = _node.permission_findings(bus)
    try:
        import torch
    except Exception as error:
        return report, [*findings, Finding("error", f"torch cannot be imported: {error}", "install torch >= 2.10")]
    hip, cuda = torch.version.hip, torch.version.cuda
    report["torch"] = {"version": torch.__version__, "hip": hip, "cuda": cuda, "visible": torch.cuda.device_count()}
    report["torch"]["collectives"] = _node.collectives()
    vendor = "amd" if hip else "nvidia" if cuda else None
    findings += _node.vendor_findings(bus, vendor, torch.cuda.device_count())
    try:
        from portable_indexer.device import detect

        device = detect()
    except Exception as error:
        return report, [*findings, Finding("error", f"the device cannot be read: {error}", "check driver and torch")]
    report["device"] = device.to_dict()
    findings += _node.package_findings(hip or cuda, bool(hip), device.arch)
    findings += _node.mixed_finding([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
    partition = _node.partition_finding(device)
    findings += [partition] if partition else []
    report["backends"], chosen, more = _backends(device)
    findings += more
    report["backend"] = chosen
    report["policy"], more = _policy(device)
    findings += more
    report["vllm"], more = _vllm()
    findings += more
    if chosen is not None and self_test:
        report["self_test"], more = _self_test(device)
        findings += more
    return report, findings


def _backends(device: Any) -> tuple[dict[str, str | None], str | None, list[Finding]]:
    """Each backend with the reason why it cannot serve (None: it can), and the one that is chosen."""
    from portable_indexer.registry import list_backends, resolve, why_not

    reasons = {name: why_not(name, device) for name in list_backends()}
    try:
        chosen = resolve(device).name
    except ValueError as error:
        return reasons, None, [Finding("error", f"no backend can run: {error}", "see the reasons above")]
    if device.is_gpu and chosen == "reference":
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        text = f"only the slow reference backend runs on this GPU ({why})"
        return reasons, chosen, [Finding("error", text, "mend the reason given for the device's own backend")]
    return reasons, chosen, []


def _policy(device: Any) -> tuple[dict[str, Any], list[Finding]]:
    """Where the tuning numbers come from, and from how many rows on steps are sharded."""
    from portable_indexer.exchange.gather import chosen_algorithm
    from portable_indexer.policy import ShardPolicy
    from portable_indexer.tuning import tuning_for
    from portable_indexer.workspace import logits_budget

    tuning = tuning_for(device)
    try:
        policy = ShardPolicy(costs=tuning.costs)
        algorithm = chosen_algorithm(None)
        logits_budget()
    except ValueError as error:
        return {"tuning": tuning.origin}, [Finding("error", str(error), "unset the variable or mend its value")]
    rows = {
        tp: {"new prompt": policy.break_even_rows(tp), "131,072 keys": policy.break_even_rows(tp, 131_072)}
        for tp in (2, 4, 8)
    }
    return {
        "tuning": tuning.origin,
        "sources": sorted(set(tuning.sources.values())),
        "mode": policy.mode,
        "exchange_algorithm": algorithm,
        "shards_from_rows": rows,
        "fingerprint": policy.fingerprint(),
    }, []


def _vllm() -> tuple[dict[str, Any], list[Finding]]:
    """Whether vLLM is here and would load the plugin."""
    from portable_indexer.vllm_plugin import status

    found = status()
    findings = []
    if found.get("error"):
        findings.append(Finding("error", str(found["error"]), "unset the variable or mend its value"))
    allowed = _node.environment().get("VLLM_PLUGINS")
    found["would_load"] = bool(found.get("vllm") and found.get("entry_point"))
    if found.get("vllm") and not found.get("entry_point"):
        findings.append(
            Finding(
                "warning",
                "vLLM is here, but the plugin's entry point is not installed",
                "pip install portable-indexer with vLLM's Python",
            )
        )
    if allowed is not None and "portable_indexer" not in allowed.split(","):
        found["would_load"] = False
        findings.append(Finding("note", f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin"))
    return found, findings


def _self_test(device: Any) -> tuple[str, list[Finding]]:
    """Compute a small problem with ties on the chosen backend and on the reference, and compare every id."""
    import torch

    import portable_indexer as pi

    where = torch.device("cuda", device.index or 0) if device.is_gpu else torch.device("cpu")
    dtype = torch.float8_e4m3fnuz if device.fp8 == "fnuz" else torch.float8_e4m3fn
    rows, keys, heads, dim, topk = 32, 640, 32, 128, 64

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape).float()

    q, k, weights = draw(rows, heads, dim).to(dtype), draw(keys, dim).to(dtype), draw(rows, heads)
    ke = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32)
    whole = [q, k, torch.ones(keys), weights, torch.zeros_like(ke), ke]
    try:
        a = [tensor.to(where) for tensor in whole]
        got = pi.index_topk(a[0], (a[1], a[2]), a[3], a[4], a[5], topk).cpu()
        wanted = pi.index_topk(q, (k, whole[2]), weights, whole[4], ke, topk, backend="reference")
    except Exception as error:
        text = f"a small problem failed: {type(error).__name__}: {error}"
        return "failed", [Finding("error", text, "try another version of Triton")]
    if torch.equal(got, wanted):
        return "passed", []
    wrong = int((got != wanted).any(dim=1).sum())
    text = f"{wrong} of {rows} rows of a small problem differ from the reference"
    return "wrong", [Finding("error", text, "do not use this backend here: another version of Triton may be right")]


def _print(report: dict[str, Any]) -> None:
    present = [f"{name} {version}" for name, version in report["versions"].items() if version]
    absent = [name for name, version in report["versions"].items() if not version]
    print("packages   " + ", ".join(present) + (f"; absent: {', '.join(absent)}" if absent else ""))
    for name, value in report["environment"].items():
        print(f"           {name}={value}")
    print("PCI bus    " + (", ".join(report["pci"]) or "no AMD or NVIDIA GPU"))
    if "torch" in report:
        torch = report["torch"]
        build = f"HIP {torch['hip']}" if torch["hip"] else f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
        extra = f", {torch['collectives']}" if torch["collectives"] else ""
        print(f"torch      built for {build}{extra}, sees {torch['visible']} GPU(s)")
    if "device" in report:
        print("device")
        gpu = report["device"]["vendor"] != "cpu"
        for name, value in report["device"].items():
            if name != "sources" and (gpu or value is not None):
                source = report["device"]["sources"].get(name)
                print(f"  {name:14} {_text(name, value):32} {f'({source})' if source else ''}".rstrip())
    for name, reason in report.get("backends", {}).items():
        mark = "-> " if name == report.get("backend") else "   "
        print(f"{'backend':8}{mark}{name}: {reason or 'can serve'}")
    policy = report.get("policy")
    if policy:
        sources = f" ({', '.join(policy['sources'])})" if policy.get("sources") else ""
        print(f"policy     mode {policy.get('mode', '?')}, numbers: {policy['tuning']}{sources}")
        _print_rows(policy.get("shards_from_rows", {}))
    vllm = report.get("vllm")
    if vllm:
        state = "would load the plugin" if vllm["would_load"] else "does not load the plugin"
        if vllm.get("mode"):
            state += f": mode {vllm['mode']}, kernels {vllm['kernels']}"
        print(f"vLLM       {vllm['vllm'] + ', ' + state if vllm['vllm'] else 'not installed'}")
    if "self_test" in report:
        print(f"self-test  {report['self_test']}")
    for finding in report["findings"]:
        print(f"{finding['level']:10} {finding['what']}")
        if finding["remedy"]:
            print(f"           remedy: {finding['remedy']}")
    slow = report.get("backend") == "reference" and report["device"]["vendor"] == "cpu"
    ready = "ready, on the CPU with the reference backend: for tests, not for serving" if slow else "ready"
    print(ready if report["ok"] else "not ready: see the errors above")


def _print_rows(ranks: dict[int, dict[str, int | None]]) -> None:
    """From how many prefill rows of a step on it is sharded."""
    if ranks and not any(value for rows in ranks.values() for value in rows.values()):
        print("           auto shards no step here")
        return
    for tp, rows in ranks.items():
        cells = [f"{value:,} ({name})" if value else f"never ({name})" for name, value in rows.items()]
        print(f"           {tp} ranks: shards steps of so many rows or more: {', '.join(cells)}")


def _text(name: str, value: Any) -> str:
    if value is None:
        return "unknown" if name != "partition" else "none that is known"
    if name in _UNITS:
        size, unit = _UNITS[name]
        return f"{value / size:,.1f} {unit}"
    if name == "pci_device_id":
        return f"{value:#06x}"
    if name == "links":
        if not value:
            return "no other visible device"
        return ", ".join(
            f"{link['kind']} to {link['peers']}"
            + (f" at {link['bandwidth'] / 1e9:.0f} GB/s" if link["bandwidth"] else "")
            for link in value
        )
    return str(value)

"""Small C libraries that stand in for libamd_smi.so and libnvidia-ml.so.1, built from recorded values.

The real Python bindings load them: every symbol a binding asks for exists, those that `detect` needs answer
from a table, all others say "not supported". A Python process of its own then runs `detect` on them, with
torch's device properties recorded beside the values.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Packed ASCII as HIP hands it to torch: the 16 bytes of a UUID spell the serial's 16 hexadecimal digits.
AMD_SERIAL = "6f1a{:012x}"


def hip_uuid(serial: str) -> str:
    """A serial of 16 hexadecimal digits in the form in which torch prints it on ROCm."""
    raw = serial.encode().hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def quote(text: str) -> str:
    return json.dumps(text)


@dataclass
class AmdGpu:
    """What amdsmi's C library answers about one processor."""

    bdf: tuple[int, int, int, int]
    serial: str
    hip_uuid: str
    device_id: int
    units: int
    vram_mb: int
    market_name: str = "AMD Instinct"
    compute_partition: str | None = "SPX"
    memory_partition: str | None = "NPS1"
    bandwidth_gb: int = 0


@dataclass
class NvidiaGpu:
    """What NVML answers about one device; `parent` is the index of a MIG instance's card."""

    uuid: str
    bus_id: str
    device_id: int
    memory: int
    name: str
    nvlinks: int = 18
    nvlink_version: int = 4
    parent: int = -1
    memory_status: int = 0
    parent_status: int = 0


@dataclass
class Node:
    """A whole scene: the library's GPUs and failures, and torch's view."""

    vendor: str
    gpus: list[Any]
    torch: list[dict[str, Any]]
    runtime: str
    init_status: int = 0
    not_supported: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    link_type: int = 2
    link_mb: int = 64_000
    before: str = ""
    env: dict[str, str] = field(default_factory=dict)
    current: int = 0


AMD_HEADER = r"""
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t bdf; const char *serial, *hip_uuid; uint64_t device_id; uint32_t units;
                 uint64_t vram_mb; const char *name, *compute, *memory; uint64_t bandwidth; } gpu;
typedef struct { char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id;
                 uint64_t device_id; uint32_t rev_id; char asic_serial[256]; uint32_t oam_id, units;
                 uint64_t target; uint32_t subsystem_id, reserved[21]; } asic_info;
typedef struct { uint32_t type; char vendor[256]; uint64_t size; uint32_t bit_width; uint64_t max_bandwidth;
                 uint64_t reserved[37]; } vram_info;
typedef struct { char version[256], date[256], name[256]; } driver_info;
typedef struct { uint32_t render, card, hsa, hip; char uuid[256]; } enumeration_info;
"""

AMD_BODY = r"""
int amdsmi_init(uint64_t flags) { return INIT_STATUS; }
int amdsmi_shut_down(void) { return 0; }
int amdsmi_get_socket_handles(uint32_t *n, void **out) { if (out) out[0] = gpus; *n = 1; return 0; }
int amdsmi_get_processor_handles(void *socket, uint32_t *n, void **out) {
  if (out) for (uint32_t i = 0; i < *n && i < COUNT; i++) out[i] = &gpus[i];
  *n = COUNT; return 0; }
int amdsmi_get_gpu_device_bdf(gpu *g, uint64_t *out) { *out = g->bdf; return 0; }
int amdsmi_get_gpu_enumeration_info(gpu *g, enumeration_info *out) {
  memset(out, 0, sizeof *out); strcpy(out->uuid, g->hip_uuid); return 0; }
int amdsmi_get_gpu_asic_info(gpu *g, asic_info *out) {
  memset(out, 0, sizeof *out); strcpy(out->market_name, g->name); out->vendor_id = 0x1002;
  out->device_id = g->device_id; strcpy(out->asic_serial, g->serial); out->units = g->units;
  out->target = 0x942; return 0; }
int amdsmi_get_gpu_vram_info(gpu *g, vram_info *out) {
  memset(out, 0, sizeof *out); out->size = g->vram_mb; out->max_bandwidth = g->bandwidth; return 0; }
int amdsmi_get_gpu_driver_info(gpu *g, driver_info *out) {
  memset(out, 0, sizeof *out); strcpy(out->version, "6.14.14"); strcpy(out->name, "amdgpu"); return 0; }
static int text(const char *from, char *out, uint32_t length) {
  if (!from) return 2;
  strncpy(out, from, length); return 0; }
int amdsmi_get_gpu_compute_partition(gpu *g, char *out, uint32_t n) { return text(g->compute, out, n); }
int amdsmi_get_gpu_memory_partition(gpu *g, char *out, uint32_t n) { return text(g->memory, out, n); }
int amdsmi_topo_get_link_type(gpu *a, gpu *b, uint64_t *hops, uint32_t *type) {
  if (a == b) return 1;
  *hops = 1; *type = LINK_TYPE; return 0; }
int amdsmi_get_minmax_bandwidth_between_processors(gpu *a, gpu *b, uint64_t *low, uint64_t *high) {
  *low = LINK_MB; *high = LINK_MB; return 0; }
"""

NVML_HEADER = r"""
#include <stdint.h>
#include <string.h>
typedef struct { const char *uuid, *bus_id; uint32_t device_id; uint64_t memory; const char *name;
                 int nvlinks; uint32_t version; int parent, memory_status, parent_status; } gpu;
typedef struct { char legacy[16]; uint32_t domain, bus, device, pci_device_id, subsystem;
                 char bus_id[32]; } pci;
typedef struct { uint64_t total, free, used; } memory_info;
"""

NVML_BODY = r"""
int nvmlInitWithFlags(unsigned flags) { return INIT_STATUS; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "an error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **out) {
  for (int i = 0; i < COUNT; i++) if (!strcmp(uuid, gpus[i].uuid)) { *out = &gpus[i]; return 0; }
  return 6; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, gpu **out) {
  for (int i = 0; i < COUNT; i++)
    if (gpus[i].parent < 0 && strstr(gpus[i].bus_id, bus)) { *out = &gpus[i]; return gpus[i].parent_status; }
  return 6; }
int nvmlDeviceIsMigDeviceHandle(gpu *g, unsigned *out) { *out = g->parent >= 0; return 0; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu *g, gpu **out) {
  *out = &gpus[g->parent]; return g->parent_status; }
int nvmlDeviceGetPciInfo_v3(gpu *g, pci *out) {
  memset(out, 0, sizeof *out); strcpy(out->bus_id, g->bus_id);
  out->pci_device_id = g->device_id << 16 | 0x10de; return 0; }
int nvmlDeviceGetMemoryInfo(gpu *g, memory_info *out) { out->total = g->memory; return g->memory_status; }
int nvmlDeviceGetName(gpu *g, char *out, unsigned n) { strncpy(out, g->name, n); return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "580.159.04", n); return 0; }
int nvmlDeviceGetP2PStatus(gpu *a, gpu *b, unsigned index, unsigned *out) {
  *out = index == 2 && a->nvlinks && b->nvlinks ? 0 : 5; return 0; }
int nvmlDeviceGetNvLinkState(gpu *g, unsigned link, unsigned *out) {
  if ((int)link >= g->nvlinks) return 3;
  *out = 1; return 0; }
int nvmlDeviceGetNvLinkVersion(gpu *g, unsigned link, unsigned *out) { *out = g->version; return 0; }
"""


def build(node: Node, folder: Path) -> dict[str, str]:
    """Compile the node's library under `folder`; returns the environment in which a binding finds it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in library")
    amd = node.vendor == "amd"
    package = "amdsmi" if amd else "pynvml"
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the stand-in library needs the package {package}")
    if amd:
        text = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text()
        wanted = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", text))
        entries = ",\n".join(_amd_entry(gpu) for gpu in node.gpus)
        header, body, name = AMD_HEADER, AMD_BODY, folder / "lib" / "libamd_smi.so"
        unsupported = 2
    else:
        text = Path(spec.origin).read_text()
        wanted = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"', text))
        entries = ",\n".join(_nvidia_entry(gpu) for gpu in node.gpus)
        header, body, name = NVML_HEADER, NVML_BODY, folder / "lib" / "libnvidia-ml.so.1"
        unsupported = 3
    assert len(wanted) > 100, "the binding no longer names its symbols the way this reads them"
    for symbol in (*node.not_supported, *node.leave_out):
        body = re.sub(rf"(?m)^(int|const char \*) ?{symbol}\((?:.|\n)*?\}}\n(?=int|static|const|\Z)", "", body)
    answered = set(re.findall(r"(?m)^(?:int|const char \*) ?(\w+)\(", body))
    stubs = "\n".join(f"int {s}() {{ return {unsupported}; }}" for s in sorted(wanted - answered - set(node.leave_out)))
    source = f"{header}\nstatic gpu gpus[] = {{ {entries} }};\n{body}\n{stubs}\n"
    name.parent.mkdir(parents=True, exist_ok=True)
    (folder / "library.c").write_text(source)
    defines = {
        "COUNT": len(node.gpus),
        "INIT_STATUS": node.init_status,
        "LINK_TYPE": node.link_type,
        "LINK_MB": node.link_mb,
    }
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(name), str(folder / "library.c")]
    command += [f"-D{key}={value}" for key, value in defines.items()]
    subprocess.run(command, check=True, timeout=60)
    return {"ROCM_PATH": str(folder), "LD_LIBRARY_PATH": str(folder / "lib")}


def _text(value: str | None) -> str:
    return "0" if value is None else quote(value)


def _amd_entry(g: AmdGpu) -> str:
    domain, bus, device, function = g.bdf
    bdf = function | device << 3 | bus << 8 | domain << 16
    texts = ", ".join(_text(v) for v in (g.market_name, g.compute_partition, g.memory_partition))
    head = f"{bdf}u, {quote(g.serial)}, {quote(g.hip_uuid)}, {g.device_id}, {g.units}u"
    return f"{{ {head}, {g.vram_mb}, {texts}, {g.bandwidth_gb} }}"


def _nvidia_entry(g: NvidiaGpu) -> str:
    head = f"{quote(g.uuid)}, {quote(g.bus_id)}, {g.device_id}, {g.memory}ull, {quote(g.name)}"
    return f"{{ {head}, {g.nvlinks}, {g.nvlink_version}, {g.parent}, {g.memory_status}, {g.parent_status} }}"


# Runs in its own process: torch is replaced by recorded properties, everything else is real.
CHILD = r"""
import json, logging, sys, types
scene = json.loads(sys.argv[1])
class Properties:
    def __init__(self, values): self.__dict__.update(values)
    def __getattr__(self, name):
        if name in self.__dict__.get("raises", ()): raise RuntimeError("cannot read " + name)
        raise AttributeError(name)
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    is_available=lambda: True, current_device=lambda: scene["current"],
    device_count=lambda: len(scene["torch"]),
    get_device_properties=lambda i: Properties(scene["torch"][i]))
amd = scene["vendor"] == "amd"
versions = (scene["runtime"], None) if amd else (None, scene["runtime"])
torch.version = types.SimpleNamespace(hip=versions[0], cuda=versions[1])
sys.modules["torch"] = torch
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append(record.getMessage())
logging.getLogger("portable_indexer").addHandler(Keep())
import portable_indexer._sysfs as sysfs, pathlib
sysfs.ROOT = pathlib.Path(scene["sysfs"])
exec(scene["before"])
from portable_indexer.device import detect
device = detect()
again = detect()
print(json.dumps({"device": device.to_dict(), "same": again is device, "warnings": records}))
"""


@dataclass
class Seen:
    """What `detect` made of a scene."""

    device: dict[str, Any]
    warnings: list[str]
    stdout: str


def look(node: Node, tmp_path: Path, library: dict[str, str] | None = None) -> Seen:
    """Run `detect` on the node in a process of its own; `library` overrides where the library is found."""
    env = {k: v for k, v in os.environ.items() if not k.endswith("VISIBLE_DEVICES") and k != "ROCM_HOME"}
    env.update(build(node, tmp_path) if library is None else library)
    env.update(node.env)
    env["PYTHONPATH"] = str(ROOT)
    scene = {
        "vendor": node.vendor,
        "torch": node.torch,
        "runtime": node.runtime,
        "before": node.before,
        "current": node.current,
        "sysfs": str(tmp_path / "sys"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(scene)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1])
    assert answer["same"], "detect() must keep its answer"
    return Seen(answer["device"], answer["warnings"], "\n".join(lines[:-1]))

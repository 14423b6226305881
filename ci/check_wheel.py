"""Checks what a wheel holds and asks for: ``python ci/check_wheel.py dist/portable_indexer-*.whl``."""

from __future__ import annotations

import sys
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("reference", "triton_common", "triton_cuda", "triton_rocm")


def faults(wheel: Path) -> list[str]:
    """What is wrong with the wheel; empty if nothing."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(metadata).decode())
    info = metadata.rpartition("/")[0]
    tops = {name.partition("/")[0] for name in names} - {info}
    if tops != {"portable_indexer"}:
        found.append(f"adds the global names {sorted(tops)}, not portable_indexer alone")
    for package in PACKAGES:
        if f"portable_indexer/backends/{package}/__init__.py" not in names:
            found.append(f"lacks the backend package {package}")
    if "portable_indexer/py.typed" not in names:
        found.append("lacks py.typed")
    if not any(name.startswith("portable_indexer/tuning/") and name.endswith(".json") for name in names):
        found.append("lacks the tuning data")
    stale = [name for name in names if name.endswith(".py") and not (ROOT / name).is_file()]
    if stale:
        found.append(f"holds files that the source has not: {stale}")
    if any(name.startswith(("portable_indexer/tests/", "tests/")) for name in names):
        found.append("holds tests")
    if not any(name.startswith(info) and name.endswith("LICENSE") for name in names):
        found.append("lacks the licence")
    for requirement in headers.get_all("Requires-Dist") or []:
        if "extra ==" not in requirement:
            found.append(f"requires {requirement}: an install may replace the node's own package")
    return found


def main() -> int:
    wheels = [Path(argument) for argument in sys.argv[1:]]
    if not wheels:
        print(__doc__, file=sys.stderr)
        return 2
    wrong = [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]
    for line in wrong or [f"{wheel.name}: as it should be" for wheel in wheels]:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

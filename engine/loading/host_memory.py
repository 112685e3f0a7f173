"""How much memory this process could still take without anything being swapped out or killed for it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the memory that is still to be had, in bytes, or None where the system does not say.

    Linux: ``MemAvailable``, or what the container's limit (cgroup 2) leaves, whichever is less. macOS: what
    ``vm_stat`` calls free, inactive, speculative or purgeable.
    """
    try:
        text = meminfo.read_text()
    except OSError:
        return _available_from_vm_stat()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        return None
    available = int(match[1]) * 1024
    limit = _available_in_cgroup(cgroup)
    return available if limit is None else min(available, limit)


def _available_in_cgroup(cgroup: Path) -> int | None:
    """What is left below the limit, counting file cache that the kernel would drop as left."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics = (cgroup / "memory.stat").read_text()
    except (OSError, ValueError):  # No cgroup 2, not in a container, or no limit ("max").
        return None
    inactive = re.search(r"^inactive_file (\d+)", statistics, re.MULTILINE)
    return max(0, limit - used + (int(inactive[1]) if inactive else 0))


def _available_from_vm_stat() -> int | None:
    try:
        output = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    page = re.search(r"page size of (\d+) bytes", output)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", output, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and pages else None

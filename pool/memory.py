"""What a process really holds in memory, where the system says so."""

import os
from pathlib import Path


def resident_bytes(pid: int) -> int | None:
    """Return the memory that a process has to itself, mapped files not counted; None: unknown (not Linux)."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None

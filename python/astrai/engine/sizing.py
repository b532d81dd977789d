"""How many KV pages an engine gets when nobody says."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from astrai.config import ModelConfig
from astrai.kv_cache import KVCache

# Share of the memory that is free when the engine starts. The rest is for everybody else.
CPU_MEMORY_SHARE = 0.25
GPU_MEMORY_SHARE = 0.85

_CGROUP = Path("/sys/fs/cgroup")


def default_num_pages(
    config: ModelConfig,
    *,
    max_batch: int,
    max_context: int,
    page_size: int,
    dtype: torch.dtype,
    free_bytes: int,
    share: float,
) -> int:
    """Enough pages for max_batch sequences of max_context tokens, within the memory budget.

    The budget is `share` of `free_bytes`. Raises ValueError when not even one page fits.
    """
    wanted = max_batch * -(-max_context // page_size)
    page_bytes = KVCache.page_bytes(config, page_size, dtype)
    budget = int(free_bytes * share) // page_bytes
    if budget < 1:
        raise ValueError(
            f"LLM: {free_bytes} bytes of memory are free; expected at least "
            f"{math.ceil(page_bytes / share)} for one page of "
            f"{page_size} tokens"
        )
    return min(wanted, budget)


def free_memory(device: torch.device) -> tuple[int, float]:
    """Free bytes on a device and the share of them that pages may take.

    On a CPU: what the system calls available, or what the container's limit leaves if that is less.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], GPU_MEMORY_SHARE
    left = [_meminfo_available()]
    for files in _CGROUP_FILES:
        in_container = _container_available(*files)
        if in_container is not None:
            left.append(in_container)
    return max(min(left), 0), CPU_MEMORY_SHARE


# Limit, use, statistics and, in those, the file pages that the kernel drops when memory is asked
# for: of the second and of the first version of control groups.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def _container_available(limit: str, use: str, statistics: str, reclaimable: str) -> int | None:
    """Bytes that the container's limit leaves, or None without such a limit.

    Cached file pages count as used there; a build or a download fills the limit with them.
    """
    try:
        allowed = (_CGROUP / limit).read_text().strip()
        if allowed == "max":
            return None
        used = int((_CGROUP / use).read_text())
        lines = (_CGROUP / statistics).read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(allowed) - used + int(counts.get(reclaimable, 0))


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        # A system that does not say what is available: take half of what is installed.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))

"""``girih info``."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import torch

from girih.cli import cli
from girih.dense.accel import onednn, openmp
from girih.report.text import size

PACKAGES = ("torch", "numba", "numpy", "pyarrow", "safetensors", "fsspec", "tensorboard")
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
HUGE_PAGES_SHARED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@cli.command()
def info() -> int:
    """Show the machine and the versions; a bug report should carry this."""
    rows = {
        "girih": version("girih"),
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "processor": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch",
        "memory": size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use",
        "bfloat16": "in hardware"
        if _has("avx512_bf16") or _has("bf16")
        else "emulated: slow on this processor",
        "float32 layers": "oneDNN" if onednn.available() else "as PyTorch has them",
        "idle threads": openmp.spins(),
        "huge pages": _selected(HUGE_PAGES) + ", shared memory: " + _selected(HUGE_PAGES_SHARED),
        "shared memory": size(shutil.disk_usage("/dev/shm").free) + " free"
        if Path("/dev/shm").is_dir()
        else "none",
    }
    for name, value in rows.items():
        click.echo(f"{name:14} {value}")
    if _selected(HUGE_PAGES) == "never":
        click.echo("hint: huge pages are off; large tables read about twice as fast with them set to madvise")
    if _selected(HUGE_PAGES_SHARED) == "never":
        click.echo(
            "hint: shared memory, in which embedding servers keep rows, has no huge pages; set shmem_enabled to"
            ' advise, or store.arena = "heap"'
        )
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpuinfo() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""


def _processor() -> str:
    names = [
        line.partition(":")[2].strip() for line in _cpuinfo().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def _has(flag: str) -> bool:
    return any(
        flag in line.split() for line in _cpuinfo().splitlines() if line.startswith(("flags", "Features"))
    )


def _selected(path: str) -> str:
    file = Path(path)
    if not file.is_file():
        return "unknown"
    text = file.read_text()
    return text[text.find("[") + 1 : text.find("]")]

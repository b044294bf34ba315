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

from girih.cli import cli, gpus
from girih.dense.accel import onednn, openmp
from girih.kernels.cpu import ahead
from girih.kernels.cpu.jit import CACHE_DIRECTORY, CACHE_WARNING, KERNELS
from girih.report.text import size
from girih.version import __version__

PACKAGES = ("torch", "triton", "numba", "numpy", "pyarrow", "safetensors", "fsspec", "tensorboard")
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
HUGE_PAGES_SHARED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@cli.command()
def info() -> int:
    """Show the machine, the versions, and what runs on its GPUs."""
    flags = set(" ".join(_cpuinfo("flags", "Features")).split())
    rows = {
        "girih": __version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "processor": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch",
        "memory": size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        **gpus.described(),
        "bfloat16": "in hardware" if flags & {"avx512_bf16", "bf16"} else "emulated: slow on this processor",
        "float32 layers": "oneDNN" if onednn.pays() else "as PyTorch has them",
        "kernels": _kernels(),
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


def _kernels() -> str:
    count = f"{len(KERNELS) - len(ahead.missing_of(KERNELS))} of {len(KERNELS)} compiled"
    return f"{count}, in {CACHE_DIRECTORY}" if CACHE_DIRECTORY else CACHE_WARNING or "plain Python"


def processor() -> str:
    """The name of this machine's processor."""
    return (_cpuinfo("model name") or [platform.processor() or platform.machine()])[0]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpuinfo(*keys: str) -> list[str]:
    """The values of some keys of ``/proc/cpuinfo``; none where the system has no such file."""
    file = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in file.read_text().splitlines()] if file.is_file() else []
    return [value.strip() for key, _, value in lines if key.strip() in keys]


def _selected(path: str) -> str:
    """The word in brackets, as in ``always [madvise] never``."""
    file = Path(path)
    return file.read_text().partition("[")[2].partition("]")[0] if file.is_file() else "unknown"

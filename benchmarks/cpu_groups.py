"""Control groups that bound the processor time of a host's processes, and count it. Needs root; cgroup v1 or v2.

The kernel gives a group ``quota`` of every ``PERIOD_US`` and stops its processes for the rest. With a period of 10 ms a tenth of a core
runs a loop at 0.10 of full speed with stalls of at most 38 ms. With the kernel's default of 100 ms it runs at 0.07, and stalls
take 91 ms.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PERIOD_US, LEAST_US = 10_000, 1_000
LEAST_CORES = LEAST_US / PERIOD_US
"""The kernel accepts no smaller quota."""
EMPTIED_S = 5.0


@dataclass(frozen=True)
class CpuGroup:
    """The group of one host.

    Attributes:
        folders: of the group: one with cgroup v2, those of ``cpu`` and ``cpuacct`` with v1.
        unified: True with v2.
    """

    folders: tuple[Path, ...]
    unified: bool

    @property
    def command(self) -> tuple[str, ...]:
        """A prefix of a command, which then runs in the group."""
        joins = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in self.folders)
        return ("sh", "-c", f'{joins}; exec "$@"', "sh")

    @property
    def usage_file(self) -> Path:
        """The file that :func:`used_s` reads."""
        return self.folders[-1] / ("cpu.stat" if self.unified else "cpuacct.usage")

    def limit(self, cores: float | None) -> dict[str, str]:
        """File → content that bounds the group to so many cores. None: no bound.

        Raises:
            ValueError: less than the kernel can give.
        """
        if cores is not None and cores < LEAST_CORES:
            raise ValueError(f"cores = {cores}: the smallest quota of the kernel is {LEAST_CORES} of a core")
        quota = None if cores is None else round(cores * PERIOD_US)
        folder = self.folders[0]
        if self.unified:
            return {str(folder / "cpu.max"): f"{'max' if quota is None else quota} {PERIOD_US}"}
        period, least = (str(folder / f"cpu.cfs_{name}_us") for name in ("period", "quota"))
        return {period: str(PERIOD_US), least: str(-1 if quota is None else quota)}

    def remove(self) -> None:
        """Removes the empty group; waits until its last process has left."""
        for folder in self.folders:
            until = time.monotonic() + EMPTIED_S
            while folder.is_dir():
                with suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > until:
                    raise RuntimeError(f"{folder}: processes are left in this group: {_members(folder)}")
                time.sleep(0.05)


def missing() -> str | None:
    """Why there can be no groups here; None where there can."""
    if not parents():
        return "no cgroup has the cpu controller"
    if not os.access(parents()[0], os.W_OK):
        return "needs root: control groups cannot be made"
    return None


def make(name: str) -> CpuGroup:
    """A new group below this process's own."""
    above = parents()
    unified = not (above[0] / "cpu.cfs_quota_us").exists() and (above[0] / "cgroup.controllers").exists()
    if unified:
        (above[0] / "cgroup.subtree_control").write_text("+cpu")
    group = CpuGroup(tuple(folder / name for folder in above), unified)
    for folder in group.folders:
        folder.mkdir(exist_ok=True)
    return group


def write(limits: Mapping[str, str]) -> None:
    """Writes what :meth:`CpuGroup.limit` returns."""
    for file, content in limits.items():
        Path(file).write_text(content)


def used_s(file: Path) -> float:
    """Processor time of a group so far, from its ``usage_file``."""
    text = file.read_text()
    if file.name == "cpuacct.usage":
        return int(text) / 1e9
    return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6


def parents(own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Folders below which groups are made.

    With v1: this process's own groups of ``cpu`` and ``cpuacct``, which may be one. With v2: the root, because a
    group that has processes of its own cannot bound groups below it.
    """
    paths = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, Path] = {}
    for line in mounts.read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup":
            for controller in {"cpu", "cpuacct"} & set(options.split(",")):
                found[controller] = Path(place, paths.get(controller, "/").lstrip("/"))
        controllers_file = Path(place, "cgroup.controllers")
        if kind == "cgroup2" and controllers_file.exists() and "cpu" in controllers_file.read_text().split():
            return [Path(place)]
    if len(found) < 2:
        return []
    return list(dict.fromkeys((found["cpu"], found["cpuacct"])))


def remove_all(chosen: Callable[[str], bool]) -> None:
    """Ends the processes of the groups whose names are chosen, and removes these groups."""
    for above in parents():
        for folder in (each for each in above.iterdir() if each.is_dir() and chosen(each.name)):
            for pid in _members(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            CpuGroup((folder,), unified=False).remove()


def _members(folder: Path) -> list[int]:
    with suppress(OSError):
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return []

"""What processes and links do every few milliseconds, seen by a process of its own (PICASSO, Figures 11 and 12).

Use of cores is read from the processor clock of each process (``clock_gettime``, nanoseconds): busy ticks of cores in
``/proc/stat`` are 10 ms long, as long as a sample. So work that the kernel does for nobody, such as forwarding packets
between links, is left out here. Memory is what the processes have resident; pages that they share count once for each.
Bytes moved between memory and cores are not seen: that takes counters of the processor, which virtual machines hide
(``perf stat`` has none of them here, resctrl is missing).

As a program, this file samples until its input ends.
"""

from __future__ import annotations

import json
import resource
import select
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

QUANTILES = range(0, 101, 5)


class Sampler:
    """Samples processes and links until it is asked for what it saw.

    Args:
        links: interfaces, as this machine's root sees them.
        every_ms: between samples; a machine that is busy may take longer, and each sample knows its time.
    """

    def __init__(self, pids: Iterable[int], links: Sequence[str], every_ms: float) -> None:
        asked = json.dumps({"pids": list(pids), "links": list(links), "every_s": every_ms / 1e3})
        words = [sys.executable, "-I", "-S", __file__, asked]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self, start: float, end: float) -> dict[str, Any]:
        """Samples of a span of ``time.perf_counter``: lists ``time_s``, ``cpu_s``, ``rss_bytes`` and, by link, ``bytes``."""
        told, _ = self._process.communicate()
        found: dict[str, Any] = json.loads(told)
        first, last = bisect_left(found["time_s"], start), bisect_right(found["time_s"], end)
        cut = {name: found[name][first:last] for name in ("time_s", "cpu_s", "rss_bytes")}
        return cut | {"bytes": {link: counts[first:last] for link, counts in found["bytes"].items()}}


def reduced(samples: dict[str, Any], cores: int, bytes_per_s: float | None) -> dict[str, Any]:
    """What is kept of samples: how they are spread over time, every 5 % of it.

    Returns:
        ``num``, ``every_ms`` (the mean), and quantiles of ``cores`` (share of them that the processes used) and
        ``links`` (share of the bandwidth, or bytes/s without one, of the busier direction of the busiest link);
        ``rss_bytes``, the most and the median.
    """
    times = samples["time_s"]
    spans = [after - before for before, after in pairwise(times)]
    cpu = [(after - before) for before, after in pairwise(samples["cpu_s"])]
    moved = [
        max((after[way] - before[way] for before, after in rows for way in (0, 1)), default=0)
        for rows in zip(*(list(pairwise(counts)) for counts in samples["bytes"].values()), strict=True)
    ]
    resident = sorted(samples["rss_bytes"])
    shares = {"cores": [used / span / cores for used, span in zip(cpu, spans, strict=True)]}
    if moved:
        shares["links"] = [
            count / span / (bytes_per_s or 1.0) for count, span in zip(moved, spans, strict=True)
        ]
    return {
        "num": len(times),
        "every_ms": 1e3 * sum(spans) / max(1, len(spans)),
        "rss_bytes": {"most": resident[-1], "median": resident[len(resident) // 2]},
        **{name: quantiles(values, spans) for name, values in shares.items()},
    }


def quantiles(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values below which 0, 5, …, 100 % of the weight lies."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    upto = list(accumulate(weights[place] for place in order))
    places = [bisect_left(upto, upto[-1] * percent / 100) for percent in QUANTILES]
    return [round(values[order[min(place, len(order) - 1)]], 5) for place in places]


def _main() -> None:
    asked = json.loads(sys.argv[1])
    clocks = [(~pid << 3) | 2 for pid in asked["pids"]]  # a process's own clock, see clock_getcpuclockid(3)
    resident = [Path(f"/proc/{pid}/statm") for pid in asked["pids"]]
    statistics = {link: Path("/sys/class/net", link, "statistics") for link in asked["links"]}
    page = resource.getpagesize()
    found: dict[str, Any] = {
        "time_s": [],
        "cpu_s": [],
        "rss_bytes": [],
        "bytes": {link: [] for link in statistics},
    }
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        try:
            now, used = time.perf_counter(), sum(map(time.clock_gettime, clocks))
            pages = sum(int(file.read_text().split()[1]) for file in resident)
        except (OSError, IndexError):  # a process has ended
            break
        found["time_s"].append(now)
        found["cpu_s"].append(used)
        found["rss_bytes"].append(pages * page)
        for link, folder in statistics.items():
            ways = [int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx")]
            found["bytes"][link].append(ways)
        due = max(due + asked["every_s"], now)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()

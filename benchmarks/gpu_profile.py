"""Device time of each kernel of a step, for gpu.py, as torch's profiler tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gpu_timing import wait_for_device
from torch.profiler import ProfilerActivity, profile

LEAST = 0.01
"""Kernels with a smaller share of the time are one row."""
OTHERS, ALL = "others", "all"
_OF_TORCH = {
    "radix_sort": "torch.sort", "DeviceScan": "torch.cumsum", "Memcpy HtoD": "copies to the GPU", "Mem": "other copies and zeros",
    "at::native": "torch, number by number",
}  # fmt: skip
"""What a part of a name stands for, the first one that is found."""


def kernel_times(step: Callable[[int], object], count: int) -> list[dict[str, str | float]]:
    """Rows with the kernel, its launches and its µs in a step, and its share of the device's time.

    Args:
        step: makes the step with this number, and returns when the device is done. It must be warm.
        count: how many steps to take.
    """
    wait_for_device()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for number in range(count):
            step(number)
    microseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in found.key_averages():
        if event.self_device_time_total > 0:
            name = next((name for part, name in _OF_TORCH.items() if part in event.key), event.key)
            microseconds[name] += event.self_device_time_total / count
            launches[name] += event.count / count
    return rows_of(microseconds, launches)


def rows_of(microseconds: Counter[str], launches: Counter[str]) -> list[dict[str, str | float]]:
    """Rows of a step, the kernel that takes longest first. The rest is the row "others", and the sum "all"."""
    whole = sum(microseconds.values())
    named = [name for name, time in microseconds.most_common() if time >= LEAST * whole]
    rest = [name for name in microseconds if name not in named]
    groups = [(name, [name]) for name in named] + [(OTHERS, rest), (ALL, [*microseconds])]
    return [
        {
            "kernel": title,
            "launches": sum(launches[name] for name in names),
            "µs": sum(microseconds[name] for name in names),
            "share": sum(microseconds[name] for name in names) / whole if whole else 0.0,
        }
        for title, names in groups
    ]

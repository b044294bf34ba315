"""What the directory of a run shows: its last step, its processes, and its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def recorded(directory: Path) -> int:
    """The last step that is recorded; 0 before the first one."""
    file = directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    steps = [json.loads(line).get("step", 0) for line in lines[-1:] if line.endswith(b"}")]
    return steps[0] if steps else 0


def last_of(directory: Path, role: str) -> int:
    """The pid of the process of a role that has the highest index."""
    processes = json.loads((directory / "processes.json").read_text())
    pids: list[int] = [each["pid"] for each in processes if each["role"] == role]
    return pids[-1]


def summary(directory: Path) -> dict[str, Any] | None:
    """``summary.json``; None before the end."""
    file = directory / "summary.json"
    return json.loads(file.read_text()) if file.exists() else None

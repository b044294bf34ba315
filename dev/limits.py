"""Ratchets: numbers that may only fall. ``make size`` and ``make prose`` compare their measurements with limits.json.

A limit may rise only in a commit whose message names the issue that allows it, such as "issue 40".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("limits.json")
NAMES_AN_ISSUE = re.compile(r"\bissue #?\d+", re.IGNORECASE)


def compare(measured: Mapping[str, Mapping[str, float]]) -> int:
    """Compares measurements with their limits and prints what exceeds them.

    With ``--lower`` on the command line, lowers the limits to the measurements first.

    Args:
        measured: for each kind of limit, the number of each name, such as ``{"lines": {"store": 5842}}``.

    Returns:
        The exit status: 1 if a number exceeds its limit or a limit rose without an issue.
    """
    limits = json.loads(FILE.read_text())
    if "--lower" in sys.argv[1:]:
        for kind, numbers in measured.items():
            limits[kind] = {name: min(number, limits[kind].get(name, 0)) for name, number in numbers.items()}
        FILE.write_text(json.dumps(limits, indent=1, sort_keys=True) + "\n")
    faults = unexplained_rises()
    slack = 0.0
    for kind, numbers in measured.items():
        for name, number in numbers.items():
            limit = limits[kind].get(name, 0)
            slack += max(0, limit - number)
            if number > limit:
                faults.append(f"{kind} of {name}: {number:,} exceeds the limit of {limit:,}")
    for fault in faults:
        print(f"limits: {fault}", file=sys.stderr)
    if faults:
        print("limits: make it smaller, or read dev/limits.py on how a limit may rise", file=sys.stderr)
    elif slack:
        print(f"all below their limits, by {slack:,.1f} in all; --lower takes the limits down")
    return 1 if faults else 0


def unexplained_rises() -> list[str]:
    """Limits that rose in a commit that names no issue, and are still above; empty without git's history."""
    now, faults = json.loads(FILE.read_text()), []
    for line in _git("log", "--full-history", "--format=%H %P", "--", f"./{FILE.name}").splitlines():
        commit, *parents = line.split()
        before = [limits for limits in map(_limits_at, parents) if limits]
        if not before or NAMES_AN_ISSUE.search(_git("log", "-1", "--format=%B", commit)):
            continue
        for kind, limits in _limits_at(commit).items():
            for name, limit in limits.items():
                old = max(each.get(kind, {}).get(name, 0) for each in before)
                if limit > old and now.get(kind, {}).get(name, 0) > old:
                    faults.append(
                        f"commit {commit[:8]} raises {kind} of {name} to {limit:,} and names no issue"
                    )
    return faults


def _limits_at(commit: str) -> dict[str, dict[str, float]]:
    limits: dict[str, dict[str, float]] = json.loads(_git("show", f"{commit}:./{FILE.name}") or "{}")
    return limits


def _git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], cwd=FILE.parent, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""

"""Goals of gpu.py on one H200, compared with results; and both as a section of docs/gpu.md.

Bytes on paper are those of docs/gpu.md, "How a batch goes". If they take longer than a goal at the measured rate of copies, no
machine of this kind reaches the goal. The goal is then 0.9 of that limit.

Published times of a step are for an H100. They are compared unscaled on an H100, and scaled by bandwidth on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.errors import ConfigError

BEGIN, END = "<!-- figures of a GPU: begin -->", "<!-- figures of a GPU: end -->"
SHARE_OF_LIMIT = 0.9
MEANT_FOR = "H200"
H100_TO_H200 = 3.35 / 4.8
"""Time on an H200 divided by time on an H100, if memory bandwidth alone decides."""
SPARSE, KEYS, TIERS, MODELS = "sparse half", "keys alone", "tiers", "whole models"
"""Beginnings of titles of tables; that of the first one is as gpu.py has it."""
_BATCH, _MILLION = "26 × 65,536", "10 × 104,858"


@dataclass(frozen=True)
class Goal:
    """One figure that is to be reached.

    Attributes:
        what: for readers.
        table, row: where it stands: words of the table's title, and what the row's columns begin with.
        column: which figure.
        at_most, at_least: the bound, one of them.
        limited: whether bytes on paper bound it, which the row says in ``bytes``.
        published: whose figure it is; None for a goal of our own.
        of_h100: whether the figure was measured on an H100.
    """

    what: str
    table: str
    row: Mapping[str, Any]
    column: str
    at_most: float | None = None
    at_least: float | None = None
    limited: bool = False
    published: str | None = None
    of_h100: bool = False

    def scale(self, gpu: str) -> float:
        """Factor of the bound on a GPU of this name."""
        return H100_TO_H200 if self.of_h100 and "H100" not in gpu else 1.0

    def source(self, gpu: str) -> str:
        """Who set the goal, and how it was scaled."""
        if self.published is None:
            return "ours"
        if not self.of_h100:
            return f"{self.published}, published"
        scaled = "unscaled" if self.scale(gpu) == 1.0 else "scaled to an H200 by bandwidth"
        return f"{self.published}, published for an H100, {scaled}"


def _of_sparse_half() -> Iterator[Goal]:
    for dim in (64, 128):
        for optimizer in ("sgd", "adam"):
            row = {"keys": _BATCH, "D": dim, "optimizer": optimizer}
            named = f"{_BATCH}, D = {dim}, {optimizer}"
            yield Goal(f"{named}: forward", SPARSE, row, "forward, of copies", at_least=0.7)
            yield Goal(f"{named}: backward and update", SPARSE, row, "backward, of copies", at_least=0.5)
    for optimizer, own, dynamicemb, fbgemm in (("sgd", 1.0, 1.58, 0.96), ("adam", 1.2, 1.84, 1.35)):
        row = {"keys": _MILLION, "D": 128, "optimizer": optimizer}
        named = f"{_MILLION}, D = 128, {optimizer}: a step"
        yield Goal(named, SPARSE, row, "step ms", at_most=own, limited=True)
        yield Goal(named, SPARSE, row, "step ms", at_most=dynamicemb, published="dynamicemb", of_h100=True)
        whose = "FBGEMM, static tables"
        yield Goal(named, SPARSE, row, "step ms", at_most=fbgemm, published=whose, of_h100=True)


GOALS = (
    *_of_sparse_half(),
    Goal("dedup of 1,048,576 ids", KEYS, {"what": "dedup", "keys": 1 << 20}, "ms", at_most=0.1),
    Goal("finding keys, the index half full", KEYS, {"what": "find, the index half full"}, "keys/s", at_least=3e9),
    *(
        Goal(
            f"{model}, {kind}, beside its dense half alone", MODELS,
            {"model": model, "dense half": kind, "batch": 65_536}, "of it", at_least=0.9,
        )
        for model in ("DeepFM", "DLRM")
        for kind in ("plain", "compiled")
    ),
    *(
        Goal(
            f"a tenth of the rows hot, unique keys {share:.0%} of them", TIERS, {"unique keys, of the hot rows": share}, "host ms",
            at_most=bound, published=whose,
        )
        for share in (0.8, 1.0)
        for whose, bound in (("dynamicemb", 24.0), ("FBGEMM, UVM", 15.0))
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A goal and the figure of a run.

    Attributes:
        bound: the goal's bound, or 0.9 of the machine's limit if that is easier.
        figure: None if it was not measured.
    """

    goal: Goal
    bound: float
    figure: float | None

    @property
    def verdict(self) -> str:
        """ "met", "missed" or "not measured"."""
        if self.figure is None:
            return "not measured"
        reached = self.figure <= self.bound if self.goal.at_least is None else self.figure >= self.bound
        return "met" if reached else "missed"


def compare_goals(found: Mapping[str, Any]) -> list[Comparison]:
    """Compares all goals with the JSON of gpu.py."""
    gpu = gpu_name(found)
    copies = next((t["rows"][0]["bytes/s"] for t in found["tables"] if t["title"].startswith("copies")), None)
    comparisons = []
    for goal in GOALS:
        row = _row(goal, found["tables"])
        bound = goal.at_least if goal.at_most is None else goal.at_most
        if bound is None:
            raise ValueError(f"goal {goal.what!r} has no bound")
        bound *= goal.scale(gpu)
        if goal.limited and row is not None and copies:
            bound = max(bound, 1e3 * row["bytes"] / copies / SHARE_OF_LIMIT)
        comparisons.append(Comparison(goal, bound, None if row is None else row.get(goal.column)))
    return comparisons


def gpu_name(found: Mapping[str, Any]) -> str:
    """Name of the GPU that was measured; empty without one."""
    return str(next((gpu["name"] for gpu in found["machine"]["gpus"]), ""))


def _row(goal: Goal, tables: Any) -> Mapping[str, Any] | None:
    for table in tables:
        for row in table["rows"] if goal.table in table["title"] else ():
            if all(_begins(row.get(name), value) for name, value in goal.row.items()):
                return row
    return None


def _begins(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return isinstance(found, str) and found.startswith(wanted)
    if isinstance(wanted, float):
        return isinstance(found, float) and abs(found - wanted) < 0.05
    return bool(found == wanted)


def section(found: Mapping[str, Any]) -> str:
    """The machine, every table, and every goal met or missed, as Markdown."""
    machine, versions = found["machine"], found["versions"]
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in machine["gpus"])
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    tag = found.get("options", {}).get("resume")
    lines = [
        f"`girih bench gpu`, {found['when'][:10]}{f', code {tag}' if tag else ''}, on {gpus}, CUDA {machine['cuda']}, {machine['processor']}, {machine['cores']} cores;"
        f" {packages}.",
    ]
    for table in found["tables"]:
        names = table["columns"]
        lines += ["", f"**{table['title']}**", "", _cells(names), _cells(["---"] * len(names))]
        lines += [_cells(_shown(name, row[name]) for name in names) for row in table["rows"]]
    others = [gpu["name"] for gpu in machine["gpus"] if MEANT_FOR not in gpu["name"]]
    meant = f" (ours are for an {MEANT_FOR}; they are not scaled to {', '.join(others)})" if others else ""
    lines += [
        "",
        f"**Goals**{meant}",
        "",
        _cells(["what", "goal", "measured", "", "whose"]),
        _cells(["---"] * 5),
    ]
    for each in compare_goals(found):
        sign = "≤" if each.goal.at_least is None else "≥"
        column, gpu = each.goal.column, gpu_name(found)
        bounds = (each.goal.at_most, each.goal.at_least)
        changed = all(bound is None or bound * each.goal.scale(gpu) != each.bound for bound in bounds)
        lines.append(
            _cells(
                [
                    each.goal.what,
                    f"{sign} {_shown(column, each.bound)}" + (" (0.9 of the limit)" if changed else ""),
                    _shown(column, each.figure),
                    each.verdict,
                    each.goal.source(gpu),
                ]
            )
        )
    lines += [f"\nNot identical: {what}." for what in found["not_identical"]]
    lines += [f"\nLeft out: {what}: {why}." for what, why in found["skipped"].items()]
    return "\n".join(lines) + "\n"


def write_section(page: Path, found: Mapping[str, Any]) -> None:
    """Puts the section of a result between the markers of a page.

    Raises:
        ValueError: the result is not of a GPU.
        ConfigError: the page has no markers.
    """
    if not found["machine"]["gpus"]:
        raise ValueError("measured without a GPU")
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{page}: the markers {BEGIN} and {END} are missing")
    page.write_text(f"{before}{BEGIN}\n{section(found)}{END}{behind}")


def _cells(values: Any) -> str:
    return f"| {' | '.join(values)} |"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str) or name == "D":
        return str(value)
    if name.endswith("of copies") or name in ("unique keys, of the hot rows", "hits"):
        return f"{value:.1%}"
    if value >= 1e4:
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"

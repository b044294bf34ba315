"""The parts of ``docs/scale.md`` that ``paper_sizes`` writes: curves next to published values, and changed assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pages

Found = Mapping[str, Any]
PARTS = {
    "Persia, Figure 8": "persia 8", "Persia, Figure 9": "persia 9", "DES, Table 5": "des 5", "PICASSO, Figure 15": "picasso 15",
    "HT, Figure 8": "hierarchical 8", "HT, Figure 10a": "hierarchical 10a", "HT, Figure 10b": "hierarchical 10b",
}  # fmt: skip
"""Figure → the beginning of the names of its parts."""
NO_CHANGES = "HT, Figure 10a"
SIZES = {
    "Persia, Figure 8": "GPUs", "Persia, Figure 9": "parameters", "DES, Table 5": "hosts", "PICASSO, Figure 15": "nodes",
    "HT, Figure 8": "groups or trainers", "HT, Figure 10a": "groups", "HT, Figure 10b": "trainers, and servers",
}  # fmt: skip


def page_parts(results: Found) -> dict[str, str | None]:
    """Name of a part → its text."""
    parts: dict[str, str | None] = {}
    for figure, part in PARTS.items():
        rows = pages.rows(results, figure)
        parts[part] = _curves(figure, [row for row in rows if not row["changed"]])
        if figure != NO_CHANGES:
            parts[f"{part} changes"] = _changes(rows)
    return parts


def _curves(figure: str, rows: Sequence[Found]) -> str | None:
    settings = [*dict.fromkeys(row["setting"] for row in rows)]
    arms = [*dict.fromkeys(row["arm"] for row in rows)]
    is_linear, compared = _any(rows, "of linear"), _any(rows, "of base") and len(arms) > 1
    lines = []
    for case, those in pages.grouped(rows, "setting", "x"):
        by_arm = {row["arm"]: row for row in those}
        lines.append([
            *([case["setting"]] if len(settings) > 1 else []), _size(case["x"]), *(_rate(by_arm.get(arm)) for arm in arms),
            *([_each(by_arm, "of linear")] if is_linear else []),
            *([_ratios(those, "of base"), _ratios(those, "published of base")] if compared else []),
            _published(those), _bounds(those),
        ])  # fmt: skip
    header = [
        *(["setting"] if len(settings) > 1 else []), SIZES[figure], *arms, *(["of linear"] if is_linear else []),
        *(["ratio", "published ratio"] if compared else []), "published", "bounded by",
    ]  # fmt: skip
    return pages.table(header, lines)


def _changes(rows: Sequence[Found]) -> str | None:
    """The largest size, or the largest with each arm, by changed assumption."""
    changed = {row["changed"] for row in rows if row["changed"]}
    lines = []
    for case, those in pages.grouped(rows if changed else (), "setting", "changed"):
        largest = {
            arm: max(row["x"] for row in those if row["arm"] == arm) for arm in (row["arm"] for row in those)
        }
        last = [row for row in those if row["x"] == largest[row["arm"]]]
        lines += [
            [
                case["setting"], case["changed"] or "none", row["arm"], _size(row["x"]), _rounded(row["samples/s"]),
                pages.shown(row["of linear"], "{:.2f}"), pages.shown(row["of base"], "{:.2f}"), _bound(row),
            ]
            for row in last
        ]  # fmt: skip
    header = ("setting", "changed", "arm", "size", "samples/s", "of linear", "ratio", "bounded by")
    return pages.table(header, lines)


def _any(rows: Sequence[Found], name: str) -> bool:
    return any(row[name] is not None for row in rows)


def _size(x: float) -> str:
    return f"{x:.0e}".replace("e+", "·10^") if x >= 1e6 else f"{x:g}"


def _rounded(rate: float) -> str:
    """Three digits."""
    return f"{float(f'{rate:.3g}'):,.0f}"


def _rate(row: Found | None) -> str:
    if row is None:
        return "–"
    return f"{_rounded(row['samples/s'])} ({_rounded(row['5 %'])} to {_rounded(row['95 %'])})"


def _each(by_arm: Mapping[str, Found], name: str) -> str:
    return ", ".join(pages.shown(row[name], "{:.2f}") for row in by_arm.values())


def _ratios(rows: Sequence[Found], name: str) -> str:
    """Ratios of the arms that have a base."""
    return ", ".join(pages.shown(row[name], "{:.2f}") for row in rows if row["arm"] != row["base"]) or "–"


def _published(rows: Sequence[Found]) -> str:
    """Samples/s, or words."""
    rates = [_rounded(row["published samples/s"]) for row in rows if row["published samples/s"] is not None]
    words = dict.fromkeys(row["published shape"] for row in rows if row["published shape"])
    return ", ".join([*rates, *words]) or "–"


def _bound(row: Found) -> str:
    return str(row["bottleneck"])


def _bounds(rows: Sequence[Found]) -> str:
    return ", ".join(dict.fromkeys(map(_bound, rows)))

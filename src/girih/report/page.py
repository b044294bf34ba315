"""The page of a run: one file that asks nothing of the network."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from girih.errors import RunDirectoryError, StorageFullError
from girih.report.record import RunRecord, read_run
from girih.report.style import CSS, SCRIPT
from girih.report.svg import Axis, Series, line_chart
from girih.report.text import DASH, count, duration, fraction, is_number, percent, short, size
from girih.report.timeline import timeline_section

STEP = Axis("step", "thousands", True, count)
MAX_CALIBRATION_PLOTS = 12
# An eight-pointed star of two squares, the knot that girih patterns begin with.
STAR = (
    '<svg viewBox="0 0 48 48" aria-hidden="true"><path d="M10 10h28v28h-28z"/>'
    '<path d="M24 4.2 43.8 24 24 43.8 4.2 24z"/><circle cx="24" cy="24" r="6"/></svg>'
)
_SPLITS = {"valid", "test"}
_SHOWN_ABOVE = {
    "auc",
    "logloss",
    "samples_per_s",
    "num_rows",
    "num_examples",
    "duration_s",
    "by_label",
    "phases_s",
}


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes ``report.html`` into a run directory, of a finished or a running run, and returns its path.

    Raises:
        RunDirectoryError: not a run directory, or one that cannot be written.
        StorageFullError: no room for the page.
    """
    directory = Path(run_dir)
    page = page_of(read_run(directory))
    target = directory / "report.html"
    unfinished = directory / f".report-{os.getpid()}.html"
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(
                f"{target}: no room left to write the page; free some and try again"
            ) from None
        raise RunDirectoryError(
            f"{target}: cannot be written ({error.strerror}); check its permissions"
        ) from None
    return target


def page_of(run: RunRecord) -> str:
    """The whole page, as HTML."""
    sections = [
        _header(run),
        _tiles(run),
        _notes(run),
        _curves(run),
        _labels(run),
        timeline_section(run),
        _settings(run),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} · girih</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n<footer>Drawn by <code>girih report</code> from config.toml, metrics.jsonl, summary.json and "
        f"timeline.json.</footer>\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _header(run: RunRecord) -> str:
    summary = run.summary or {}
    parts = [
        _named(summary.get("model"), run.settings.get("model")),
        _named(summary.get("strategy"), run.settings.get("strategy")),
        str(summary.get("precision") or _part(run.settings, "train").get("precision") or ""),
    ]
    state = '<span class="state">finished</span>'
    if run.summary is None:
        state = '<span class="state open">no summary yet</span>'
    told = escape(" · ".join(part for part in parts if part))
    return f"<header>{STAR}<div><h1>{escape(run.name)} {state}</h1><p>{told}</p></div></header>"


def _named(*values: Any) -> str:
    """The first that names something: a string, or a table with a name."""
    for value in values:
        name = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(name, str) and name:
            return name
    return ""


def _part(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def _tiles(run: RunRecord) -> str:
    last = run.training[-1] if run.training else {}
    if run.summary is not None:
        summary = run.summary
        split = summary.get("evaluated_on")
        label = _first_label(run) + (f" on {split}" if split else "")
        tiles = [
            ("AUC", fraction(summary.get("auc")), label),
            ("Logloss", fraction(summary.get("logloss")), label),
            ("Speed", short(summary.get("samples_per_s")), "samples/s"),
            ("Rows", short(summary.get("num_rows")), "in all tables"),
            ("Examples", short(summary.get("num_examples")), "trained on"),
            ("Duration", duration(summary.get("duration_s")), "from start to end"),
        ]
    else:
        newest = max((lines[-1] for lines in run.evaluations.values() if lines), key=_step, default={})
        told = f"{newest.get('split')}, step {count(newest.get('step'))}" if newest else "not evaluated yet"
        tiles = [
            ("AUC", fraction(newest.get("auc")), told),
            ("Loss", fraction(last.get("loss")), f"training, step {count(last.get('step'))}"),
            ("Speed", short(last.get("samples_per_s")), "samples/s"),
            ("Rows", short(last.get("rows")), "in all tables"),
            ("Examples", short(last.get("examples")), "so far"),
            ("Elapsed", duration(last.get("elapsed_s")), "at the last record"),
        ]
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(told)}</small></dd></div>"
        for name, value, told in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _first_label(run: RunRecord) -> str:
    """Its name, where it is known."""
    names = _part(run.settings, "labels").get("names")
    known = [*_part(run.summary or {}, "by_label"), *(names if isinstance(names, list) else [])]
    return str(known[0]) if known else ""


def _step(record: Mapping[str, Any]) -> float:
    return float(record["step"])


def _notes(run: RunRecord) -> str:
    if not run.notes:
        return ""
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in run.notes)}</ul>'


def _curves(run: RunRecord) -> str:
    def training(key: str, name: str, colour: int) -> list[Series]:
        return [Series(name, [(line["step"], line.get(key)) for line in run.training], colour)]

    def evaluated(key: str) -> list[Series]:
        splits = sorted(run.evaluations, key=lambda split: (split not in _SPLITS, split != "valid", split))
        return [
            Series(split, [(line["step"], line.get(key)) for line in run.evaluations[split]], 2 + at % 5)
            for at, split in enumerate(splits)
        ]

    only = list(run.evaluations) if len(run.evaluations) == 1 else []  # two or more have a legend
    score = Axis(", ".join([_first_label(run) or "first label", *only]), show=fraction)
    charts = [
        line_chart(
            "Training loss", STEP, Axis("mean of a record", show=fraction), training("loss", "train", 1)
        ),
        line_chart("AUC", STEP, score, evaluated("auc")),
        line_chart("Logloss", STEP, score, evaluated("logloss")),
        line_chart(
            "Speed", STEP, Axis("samples/s", "thousands", True, short), training("samples_per_s", "speed", 1)
        ),
        line_chart(
            "Rows", STEP, Axis("in all tables", "thousands", True, short), training("rows", "rows", 3)
        ),
        line_chart("Memory", STEP, Axis("resident", "bytes", True, size), training("rss_bytes", "memory", 5)),
    ]
    if any(is_number(line.get("hit_rate")) for line in run.training):
        axis = Axis("share of keys that had a row", show=percent)
        charts.append(line_chart("Hit rate", STEP, axis, training("hit_rate", "hit rate", 6)))
    if len({line.get("lr_scale") for line in run.training}) > 1:
        axis = Axis("times the configured rate", from_zero=True, show=fraction)
        charts.append(line_chart("Learning rate", STEP, axis, training("lr_scale", "scale", 4)))
    return f'<h2>Curves</h2><div class="cards">{"".join(charts)}</div>'


def _labels(run: RunRecord) -> str:
    by_label = {str(k): v for k, v in _part(run.summary or {}, "by_label").items() if isinstance(v, Mapping)}
    if not by_label:
        return ""
    columns = [
        ("AUC", "auc", fraction),
        ("GAUC", "gauc", fraction),
        ("Logloss", "logloss", fraction),
        ("Normalised entropy", "normalized_entropy", fraction),
        ("Calibration", "calibration", fraction),
        ("Mean label", "mean_label", fraction),
        ("Mean prediction", "mean_prediction", fraction),
        ("Examples", "num_examples", count),
    ]
    rows = [
        [name, *(show(metrics.get(key)) for _, key, show in columns)] for name, metrics in by_label.items()
    ]
    plots = [_calibration(name, metrics) for name, metrics in list(by_label.items())[:MAX_CALIBRATION_PLOTS]]
    left_out = len(by_label) - len(plots)
    told = f"<p>Plots of {left_out} more labels are left out.</p>" if left_out else ""
    return (
        "<h2>Labels</h2><p>With the final weights. A dash stands for what the examples leave undefined.</p>"
        + table(["Label", *(title for title, _, _ in columns)], rows)
        + "<h2>Calibration</h2><p>Examples in bins of about equal count, by prediction: on the dashed line, "
        f'what was predicted is what happened.</p>{told}<div class="cards">{"".join(plots)}</div>'
    )


def _calibration(name: str, metrics: Mapping[str, Any]) -> str:
    curve = metrics.get("calibration_curve")
    bins = [one for one in curve if isinstance(one, Mapping)] if isinstance(curve, Sequence) else []
    points = [(one.get("prediction"), one.get("label")) for one in bins]
    most = max([0.0, *(value for point in points for value in point if is_number(value))])
    ends = [(0.0, 0.0), (most, most)]
    series = [Series("as predicted", ends, dashed=True), Series(name, points, 1)]
    x_axis = Axis("mean prediction", from_zero=True, show=fraction)
    return line_chart(name, x_axis, Axis("mean label", from_zero=True, show=fraction), series)


def _settings(run: RunRecord) -> str:
    rows = list(_flat(run.summary or {}))
    parts = []
    if rows:
        cells = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in rows)
        parts.append(f'<div class="scroll"><table><tbody>{cells}</tbody></table></div>')
    if run.config:
        parts.append(f"<pre>{escape(run.config.strip())}</pre>")
    if not parts:
        return ""
    return f'<h2>Configuration and totals</h2><div class="pair">{"".join(parts)}</div>'


def _flat(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What the rest of the page does not show, nested tables with dotted names."""
    for key, value in summary.items():
        if key in _SHOWN_ABOVE:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", _plain(inner, one)) for inner, one in value.items())
            if not value:
                yield str(key), DASH
        else:
            yield str(key), _plain(key, value)


def _plain(key: Any, value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        whole = isinstance(value, int) or float(value).is_integer()
        return str(value) if key == "seed" else count(value) if whole else f"{value:.6g}"
    return str(value)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where it must; its cells are escaped."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

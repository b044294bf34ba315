"""The page of a run: one file that needs no network."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from girih.config.train import RECORDED
from girih.errors import RunDirectoryError, StorageFullError
from girih.files.whole import write_whole
from girih.report.charts import MAX_POINTS, Axis, Records, Spec, line_chart, timeline
from girih.report.comparing import TITLES, RunComparison, compare, named_metrics
from girih.report.record import RunRecord, read_run
from girih.report.text import DASH, count, duration, fraction, is_number, percent, short

MAX_CALIBRATION_PLOTS = 12
STEP = Axis("step", "step", ",.0f", from_zero=True)
EXAMPLES = Axis("examples", "examples", ",.0f", from_zero=True)
CURVES = (
    (Axis("loss", "Training loss"), "mean of a record"),
    (Axis("auc", "AUC"), ""),
    (Axis("logloss", "Logloss"), ""),
    (Axis("mae", "MAE"), ""),
    (Axis("rmse", "RMSE"), ""),
    (Axis("samples_per_s", "Speed", ",.0f", from_zero=True), "samples/s"),
    (Axis("rows", "Rows", ",.0f", from_zero=True), "in all tables"),
    (Axis("rss_bytes", "Memory", ".3f", from_zero=True, unit=2**30), "resident, of all processes, GiB"),
    (Axis("hit_rate", "Hit rate", ".1%"), "share of keys that had a row"),
    (Axis("gpu_share", "Reads from GPU memory", ".1%"), "share of rows that the gpu tier had"),
    (Axis("dram_share", "Reads from memory", ".1%"), "share of rows that were not on the SSD"),
    (Axis("imbalance", "Imbalance", ".3f"), "keys asked of the busiest trainer in a step, by the mean"),
    (Axis("lr_scale", "Learning rate", from_zero=True), "times the configured rate"),
)
OF_PROBABILITIES, OF_NUMBERS = ("auc", "logloss"), ("mae", "rmse")
EVALUATED = {*OF_PROBABILITIES, *OF_NUMBERS}
"""Curves of evaluations. A run has the curves that fit its first label."""
MAYBE = {"hit_rate", "gpu_share", "dram_share", "imbalance"}
"""Curves that exist only for some runs."""
_SPLITS = ("valid", "test")
_SHOWN_ABOVE = {
    "auc",
    "logloss",
    "samples_per_s",
    "num_rows",
    "num_examples",
    "duration_s",
    "by_label",
    "phases_s",
    "features",
}

_OF_SERVICES = {
    "staleness_max",
    "staleness_mean",
    "updates_since_read_max",
    "updates_since_read_mean",
    "dense_staleness_max",
    "lost_updates",
    "restarts",
    "scalings",
}
"""Totals that only runs with processes other than trainers have."""

Card = tuple[str, str, Spec | None]
"""Title, unit, and the chart if there is something to draw."""


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes ``report.html`` into the directory of a finished or a running run, and returns its path.

    Raises:
        RunDirectoryError: not a run directory, or the page cannot be written.
        StorageFullError: no space for the page.
    """
    directory = Path(run_dir)
    return _written(directory / "report.html", page_of(read_run(directory)))


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Writes a page that overlays the curves of several runs and compares their tables. Returns its path.

    Raises:
        ConfigError: fewer than two runs.
        RunDirectoryError: not a run directory, or the page cannot be written.
        StorageFullError: no space for the page.
    """
    return _written(out, comparison_of(compare(runs)))


def _written(target: Path, page: str) -> Path:
    try:
        write_whole(target, page)
    except StorageFullError:
        raise
    except OSError as error:
        raise RunDirectoryError(
            f"{target}: cannot be written ({error.strerror}); check its permissions"
        ) from None
    return target


def comparison_of(runs: RunComparison) -> str:
    """Renders the page of several runs as HTML."""
    features = [_part(run.summary, "features") for run in runs.records]
    names = dict.fromkeys(name for by_name in features for name in by_name)
    unseen = [(name, [percent(_part(by_name, name).get("unseen")) for by_name in features]) for name in names]
    metrics, options = runs.shown_metrics(), runs.shown_options()
    tables = [("Metrics", "With the final weights, or the latest ones.", metrics)]
    tables += [("Unseen ids", "Share of ids in the last evaluation without a row.", unseen)] if unseen else []
    tables += [("Options", "Those that differ.", options)] if options else []
    return (
        _templates()
        .get_template("comparison.html")
        .render(names=runs.names, curves=list(_overlaid(runs)), tables=tables, javascript=_drawing_code())
    )


def page_of(run: RunRecord) -> str:
    """Renders the whole page as HTML. The page contains the JavaScript that draws its charts once."""
    by_label = {str(k): v for k, v in _part(run.summary, "by_label").items() if isinstance(v, Mapping)}
    by_label = {name: {**metrics, **named_metrics(metrics)} for name, metrics in by_label.items()}
    probabilities = [each for each in by_label.items() if not is_number(each[1].get("mae"))]
    titles = TITLES | {"mean_label": "mean label", "mean_prediction": "mean prediction"}
    titles |= {name: name for metrics in by_label.values() for name in named_metrics(metrics)}
    computed = {name for metrics in by_label.values() for name, value in metrics.items() if value is not None}
    titles = {name: title for name, title in titles.items() if name in computed}
    newest: Mapping[str, Any] = max(
        (lines[-1] for lines in run.evaluations.values()), key=lambda line: line["step"], default={}
    )
    return (
        _templates()
        .get_template("page.html")
        .render(
            run=run,
            kind=_kind(run),
            label=_first_label(run),
            newest=newest,
            judged=list(_judged(run, newest)),
            last=run.training[-1] if run.training else {},
            curves=list(_curves(run)),
            label_titles=list(titles.values()),
            labels=[
                (name, [(count if key == "num_examples" else fraction)(metrics.get(key)) for key in titles])
                for name, metrics in by_label.items()
            ],
            calibration=[_calibration(*each) for each in probabilities[:MAX_CALIBRATION_PLOTS]],
            num_without_plot=len(probabilities[MAX_CALIBRATION_PLOTS:]),
            features=list(_features(run)),
            timeline=timeline(run),
            totals=list(_totals(run)),
            javascript=_drawing_code(),
        )
    )


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("girih", "report"), autoescape=True, trim_blocks=True
    )
    templates.filters |= {"fraction": fraction, "short": short, "count": count, "duration": duration}
    return templates


@functools.cache
def _drawing_code() -> str:
    """Makes the JavaScript that draws charts, in about two seconds."""
    with ThreadPoolExecutor(1) as thread:  # in the main thread, the engine panics if there is no /proc
        bundle: Future[str] = thread.submit(vl_convert.javascript_bundle, "window.vegaEmbed = vegaEmbed;")
    return bundle.result()


def _part(mapping: Mapping[str, object] | None, key: str) -> Mapping[str, object]:
    value = (mapping or {}).get(key)
    return value if isinstance(value, Mapping) else {}


def _kind(run: RunRecord) -> str:
    """Returns model, strategy and precision, if known."""
    summary = run.summary or {}
    parts = [
        _name(summary.get("model")) or _name(run.settings.get("model")),
        _name(summary.get("strategy")) or _name(run.settings.get("strategy")),
        str(summary.get("precision") or _part(run.settings, "train").get("precision") or ""),
    ]
    return " · ".join(part for part in parts if part)


def _name(value: object) -> str:
    """Returns the value if it is a string, or its ``name`` if it is a table. Otherwise returns the empty string."""
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else ""


def _first_label(run: RunRecord) -> str:
    names = _part(run.settings, "labels").get("names")
    known = [*_part(run.summary, "by_label"), *(names if isinstance(names, list) else [])]
    return str(known[0]) if known else ""


def _measures(run: RunRecord) -> Sequence[str]:
    """The main metrics of the first label."""
    if _part(_part(run.settings, "labels"), "loss").get(_first_label(run), "bce") != "bce":
        return OF_NUMBERS
    told = [_final(run), *itertools.chain(*run.evaluations.values())]
    return OF_NUMBERS if any(is_number(each.get("mae")) for each in told) else OF_PROBABILITIES


def _judged(run: RunRecord, newest: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Returns titles and values of the main metrics, for the final weights or else the newest weights."""
    titles = {axis.field: axis.title for axis, _ in CURVES}
    values = newest if run.summary is None else {**_final(run), **run.summary}
    for name in _measures(run):
        yield titles[name], values.get(name)


def _final(run: RunRecord) -> Mapping[str, object]:
    """Metrics of the first label with the final weights. Empty if there are none."""
    return _part(_part(run.summary, "by_label"), _first_label(run))


def _curves(run: RunRecord) -> Iterator[Card]:
    splits = sorted(run.evaluations, key=lambda split: (split not in _SPLITS, split != "valid", split))
    only = splits if len(splits) == 1 else []  # several splits have a legend
    evaluations, measures = {split: run.evaluations[split] for split in splits}, _measures(run)
    judged = ", ".join([_first_label(run) or "first label", *only])
    for axis, unit in CURVES:
        if axis.field in EVALUATED:
            if axis.field in measures:
                yield axis.title, judged, line_chart(STEP, axis, evaluations)
            continue
        values = [line.get(axis.field) for line in run.training]
        if axis.field in MAYBE and not any(map(is_number, values)):
            continue
        if axis.field == "lr_scale" and len(set(values)) < 2:
            continue
        told = f"{unit}; shaded: extremes" if len(values) > MAX_POINTS else unit
        yield axis.title, told, line_chart(STEP, axis, {axis.title: run.training})
    lines = (line for split in _SPLITS for line in run.evaluations.get(split, ()))
    for name in dict.fromkeys(name for line in lines for name in line if name not in RECORDED):
        yield name, judged, line_chart(STEP, Axis(name, name), evaluations)


def _overlaid(runs: RunComparison) -> Iterator[Card]:
    """Returns curves with a line per run and split.

    The x axis counts examples, because steps differ in size between runs.
    """
    for axis, unit in CURVES:
        series: dict[str, Records] = {}
        for name, run in zip(runs.names, runs.records, strict=True):
            if axis.field in EVALUATED:
                splits = {split: lines for split, lines in run.evaluations.items() if split in _SPLITS}
                series |= {f"{name}, {split}": lines for split, lines in splits.items()}
            elif axis.field != "lr_scale" or len({line.get("lr_scale") for line in run.training}) > 1:
                series[name] = run.training
        values = (line.get(axis.field) for lines in series.values() for line in lines)
        if any(map(is_number, values)):
            yield axis.title, unit, line_chart(EXAMPLES, axis, series)


def _calibration(name: str, metrics: Mapping[str, object]) -> Card:
    curve = metrics.get("calibration_curve")
    bins = [one for one in curve if isinstance(one, Mapping)] if isinstance(curve, Sequence) else []
    x = Axis("prediction", "mean prediction", from_zero=True)
    y = Axis("label", "mean label", from_zero=True)
    return name, y.title, line_chart(x, y, {name: bins}, diagonal=True)


def _features(run: RunRecord) -> Iterator[tuple[str, ...]]:
    """Cells of each feature. Empty for runs of versions that did not count features."""
    for name, counts in _part(run.summary, "features").items():
        if isinstance(counts, Mapping):
            rows, *ids = (count(counts.get(key)) for key in ("rows", "ids", "evaluated_ids"))
            yield str(name), str(counts.get("table") or DASH), rows, percent(counts.get("unseen")), *ids


def _totals(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Returns the entries of the summary that the rest of the page does not show. Nested tables get dotted names.

    Leaves out a zero if this kind of event cannot happen in this run.
    """
    for key, value in (run.summary or {}).items():
        if key in _SHOWN_ABOVE or (key in _OF_SERVICES and not run.services and not value):
            continue
        if isinstance(value, Mapping) and value:
            hidden = key in ("plan", "wire_bytes")
            entries = ((inner, one) for inner, one in value.items() if not (hidden and _is_zero(one)))
            yield from ((f"{key}.{inner}", _plain(inner, one)) for inner, one in entries)
        else:
            yield str(key), _plain(key, value)


def _is_zero(value: object) -> bool:
    return not any(value.values()) if isinstance(value, Mapping) else not value


def _plain(key: object, value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, Mapping):
        return ", ".join(f"{inner} {_plain(inner, one)}" for inner, one in value.items()) or DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        whole = isinstance(value, int) or float(value).is_integer()
        return str(value) if key == "seed" else count(value) if whole else f"{value:.6g}"
    return str(value)

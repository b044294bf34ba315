"""Metrics in the code, on docs/operations.md, in the dashboard and in the rules to alert by: the same everywhere."""

import json
import re
from pathlib import Path

import pytest
import yaml

from girih.config.train import MetricsOptions
from girih.telemetry.prometheus import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "girih.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
PROMETHEUS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
LABELS = {"role", "index", "incarnation", "run", "le"}


def expressions():
    for panel in DASHBOARD["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in ALERTS["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


EXPRESSIONS = list(expressions())


def metric_of(series):
    """The metric that a time series of Prometheus belongs to."""
    for metric in METRICS:
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        if series in {metric.name + ending for ending in endings}:
            return metric
    return None


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_every_query_is_of_metrics_and_labels_that_exist(title, expression):
    series = set(re.findall(r"\b(?:girih|process)_\w+", expression))
    assert series or "up{" in expression
    metrics = [metric_of(each) for each in series]
    assert None not in metrics, series
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
    known = LABELS | {metric.label for metric in metrics}
    assert grouped <= known
    assert set(re.findall(r"(\w+)=~?\"", expression)) - {"job"} <= known
    assert expression.count("(") == expression.count(")")
    for name in series:
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert title == "Lost updates" or re.search(rf"(rate|increase)\({name}", expression), name


def test_the_dashboard_shows_every_metric_and_its_panels_do_not_overlap():
    shown = {
        metric_of(series)
        for _, each in EXPRESSIONS
        for series in re.findall(r"\b(?:girih|process)_\w+", each)
    }
    assert shown == set(METRICS)
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_page_lists_every_metric_as_the_code_has_it():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (?:`(\w+)`)? ?\| (.*) \|$", section, re.MULTILINE)
    assert [(name, kind, label or None, about) for name, kind, label, about in rows] == [
        (metric.name, metric.kind, metric.label, metric.about) for metric in METRICS
    ]
    for option in MetricsOptions.__dataclass_fields__:
        assert re.search(rf"^{option} = ", section, re.MULTILINE)


def test_names_follow_the_conventions_of_prometheus():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(girih|process)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(ms|millis|kb|mb|percent)\b", metric.name)
        assert metric.label not in LABELS


def test_the_example_finds_what_runs_write():
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["honor_labels"] is True
    (found,) = job["file_sd_configs"]
    directory = '"/var/lib/girih/targets"'
    assert [f"{directory.strip(chr(34))}/*.json"] == found["files"]
    assert f"targets = {directory}" in (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    ups = [rule["expr"] for rule in ALERTS["groups"][0]["rules"] if re.match(r"up\b", rule["expr"])]
    assert ups == [f'up{{job="{job["job_name"]}"}} == 0']

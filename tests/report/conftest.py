"""A run directory as the loop writes it, of a run that could have been."""

from __future__ import annotations

import json
import math
import random

import pytest

CONFIG = """\
[data]
format = "parquet"
train = "train/*.parquet"
test = "test.parquet"
batch_size = 4096

[[features]]
name = "user <b>&amp;</b>"
kind = "categorical"
dim = 16

[model]
name = "deepfm"
hidden = [400, 400, 400]

[train]
precision = "bfloat16"

[strategy]
name = "local"
"""


def training_line(step, rng, last_step):
    done = step / last_step
    return {
        "step": step,
        "examples": step * 4096,
        "epoch": int(done * 2.999),
        "loss": 0.24 + 0.4 * math.exp(-9 * done) + rng.gauss(0, 0.012),
        "samples_per_s": 61_000 + 4_000 * math.sin(20 * done) + rng.gauss(0, 1500),
        "rows": int(5_382_000 * (1 - math.exp(-4 * done))),
        "hit_rate": 0.99 - 0.5 * math.exp(-8 * done),
        "imbalance": 1.02 + 0.3 * math.exp(-6 * done),
        "rss_bytes": int(1.1e9 + 2.4e9 * (1 - math.exp(-4 * done))),
        "elapsed_s": step * 0.067,
        "lr_scale": 0.1 if done > 0.7 else 1.0,
    }


def evaluation_line(step, split, done):
    return {
        "step": step,
        "examples": step * 4096,
        "epoch": int(done * 2.999),
        "split": split,
        "auc": 0.982 - 0.09 * math.exp(-5 * done),
        "logloss": 0.25 + 0.2 * math.exp(-5 * done),
        "normalized_entropy": 0.5,
        "calibration": 1.01,
        "gauc": 0.95,
    }


def label_metrics(rng):
    rates = [((bin_ + 1) / 21) ** 2 for bin_ in range(20)]
    return {
        "num_examples": 1_000_000,
        "auc": 0.98213,
        "logloss": 0.2512,
        "normalized_entropy": 0.512,
        "calibration": 1.013,
        "gauc": None,
        "mean_label": 0.31,
        "mean_prediction": 0.314,
        "calibration_curve": [
            {"prediction": rate, "label": min(max(rate * 0.97 + rng.gauss(0, 0.012), 0), 1), "count": 50_000}
            for rate in rates
        ],
    }


def timeline(rng, num_steps=60):
    phases = [
        ("read", 3.0),
        ("pull", 9.0),
        ("forward", 14.0),
        ("loss", 0.6),
        ("backward", 22.0),
        ("push", 8.0),
    ]
    events, now = [], 1000.0
    for _ in range(num_steps):
        begin = now
        for name, typical_ms in [*phases, ("apply", 5.0)]:
            length = typical_ms * 1000 * rng.uniform(0.8, 1.3)
            tid = 2 if name == "read" else 1
            start = now - 20_000 if name == "read" else now
            events.append({"name": name, "ph": "X", "ts": start, "dur": length, "pid": 1, "tid": tid})
            now += 0 if name == "read" else length
        events.append({"name": "step", "ph": "X", "ts": begin, "dur": now - begin, "pid": 1, "tid": 1})
    return events


def write_run(directory, num_records=1500, labels=("click", "long_view")):
    rng = random.Random(7)
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG, encoding="utf-8")
    last_step = 10 * num_records
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(10, last_step + 1, 10):
            print(json.dumps(training_line(step, rng, last_step)), file=file)
            if step % (last_step // 12) == 0:
                print(json.dumps(evaluation_line(step, "valid", step / last_step)), file=file)
        print(json.dumps(evaluation_line(last_step, "test", 1.0)), file=file)
    by_label = {label: label_metrics(rng) for label in labels}
    summary = {
        "auc": 0.98213,
        "logloss": 0.2512,
        "samples_per_s": 61_234.5,
        "num_examples": last_step * 4096,
        "num_rows": 5_382_000,
        "staleness_max": 0,
        "staleness_mean": 0.0,
        "lost_updates": 0,
        "wire_bytes": {"ids": 0, "embeddings": 0, "gradients": 0, "partials": 0, "dense": 0},
        "strategy": "local",
        "precision": "bfloat16",
        "seed": 20261105,
        "by_label": by_label,
        "duration_s": last_step * 0.067,
        "model": "deepfm",
        "steps": last_step,
    }
    (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (directory / "timeline.json").write_text(json.dumps(timeline(rng)), encoding="utf-8")
    return directory


@pytest.fixture
def run_directory(tmp_path):
    return write_run(tmp_path / "deepfm-local")


@pytest.fixture
def make_run(tmp_path):
    return lambda name, **options: write_run(tmp_path / name, **options)

"""PICASSO's Table VII: twelve models, with all of its optimisations and with none.

Two trainers under ``synchronous``, a network namespace each (needs root), links of ``--rate``. All models read the same
generated data: 60 categorical features and 4 sequences of 20 ids, dim 16, ten numbers. Batches are alike in both arms;
the paper's are two to four times as large with PICASSO, which micro-batches make room for in a GPU's memory.

    girih bench picasso_table7 [--models lr din] [--quick]
"""

from __future__ import annotations

from typing import Any

import harness
import picasso
from experiments import show
from picasso import Workload

CATEGORICAL, SEQUENCES, LENGTH, DIM = 60, 4, 20, 16
NET = {"hidden": [128, 64]}
PAIRS = {f"s{place}": f"f{place}" for place in range(SEQUENCES)}
MODELS: dict[str, dict[str, Any]] = {
    "lr": {},
    "wide_deep": NET,
    "two_tower": {**NET, "user": [f"f{place}" for place in range(CATEGORICAL // 2)]},
    "dlrm": {**NET, "bottom_hidden": [64]},
    "dcn": NET,
    "xdeepfm": {**NET, "cin_layers": [16, 16]},
    "atbrg": {**NET, "attention": {"s0": "f0"}, "relations": {"s1": "f0", "s2": "s0"}},
    "din": {**NET, "attention": PAIRS},
    "dien": {**NET, "attention": PAIRS},
    "dsin": {**NET, "attention": PAIRS},
    "can": NET,
    "star": {**NET, "domain": "domain", "num_domains": picasso.DOMAINS},
}
PAPER = {
    "lr": 2.15, "wide_deep": 1.50, "two_tower": 2.60, "dlrm": 2.71, "dcn": 1.52, "xdeepfm": 1.89, "atbrg": 1.82, "din": 2.13,
    "dien": 2.15, "dsin": 2.11, "can": 3.10, "star": 3.15,
}  # fmt: skip
"""Samples/s of PICASSO over those of XDL, from the printed gains. The printed samples/s have too few digits for ATBRG and STAR."""
ARMS = ("all", "none")


def main() -> None:
    parser = picasso.parser("picasso_table7", __doc__, batch=1024, gpu=True)
    parser.set_defaults(length=LENGTH)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    for name, default in picasso.INTERLEAVED.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=picasso.number_or_auto, default=default, metavar="N"
        )
    options = picasso.parsed(parser, {"scale": 1.0})
    report = harness.Report("picasso_table7", options)
    bench = picasso.Bench.of(options, "picasso-table7")
    arms, reason = picasso.arms(options), bench.missing()
    if reason is None:
        cases = {
            (model, arm): bench.case(f"{model}/{arm}", workload(bench, model), arms[arm])
            for model in options.models
            for arm in ARMS
        }
        found = bench.measured(cases)
        rows = []
        for (model, arm), runs in found.items():
            row = {"model": model, "optimised": "yes" if arm == "all" else "no", **picasso.columns(runs)}
            row["of unoptimised"] = (
                f"{picasso.beside(runs, found[model, 'none']):.2f}" if arm == "all" else ""
            )
            row["paper"] = f"{PAPER[model]:.2f}" if arm == "all" else ""
            rows.append(row)
        show(report, "twelve models", list(rows[0]), [list(row.values()) for row in rows])
        report.not_identical(
            "the paper's other side is XDL, a system of its own, at smaller batches; here the options are off"
        )
        print(bench.kept.told())
    else:
        report.skip("all", reason)
    report.finish()


def workload(bench: picasso.Bench, model: str) -> Workload:
    """A model over the features that all of them read."""
    made = Workload(model, {"name": model, **MODELS[model]}, CATEGORICAL, (DIM, DIM, 1), sequences=SEQUENCES)
    return bench.workload(made)


if __name__ == "__main__":
    main()

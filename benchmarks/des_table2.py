"""DES's Table 2: what substitution saves, by the paper's formulas, by girih's cost model and on the wire.

Four trainers, a network namespace each (needs root). What a trainer sends is read from its interface, less 66 bytes of
headers a packet, between two steps of one run, so that nothing of its start is in it; data are generated, as wide
as the paper's (600 features, 950 ids an example), and all contestants get the same batches.

    girih bench des_table2
    girih bench des_table2 --batches 512 2048 --models lr deepfm
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import des_savings as des
import harness
import network
import wide
from trainers import train_all

from girih.planner import traffic

TRAINERS, DIM, OUTPUTS = 4, 8, 256
PAPER = {
    512: (147_664, 99.769, 99.376, 90.310),
    1024: (257_757, 99.735, 99.285, 86.226),
    2048: (448_814, 99.696, 99.179, 81.658),
    4096: (789_511, 99.654, 99.066, 77.015),
    8192: (1_389_353, 99.607, 98.939, 72.264),
}
"""Batch → unique features, and per cent saved for LR, FM's second order, DNN."""
FIRST_LAYER_BYTES = 600 * DIM * OUTPUTS * 4
HEADERS_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 20 and its time stamps 12."""
SUMMED = {"lr": 1, "fm": DIM + 2, "dnn": OUTPUTS, "wide_deep": OUTPUTS + 1, "deepfm": OUTPUTS + DIM + 2}
"""Numbers an example that trainers sum up."""
UPPER = 64
MODES = ("replicated", "split")
NARROW = {
    "lr": {"name": "lr"},
    "fm": {"name": "fm"},
    "deepfm 128": {"name": "deepfm", "hidden": [128, 64]},
    "deepfm 400": {"name": "deepfm", "hidden": [400, 400, 400]},
    "wide_deep 1024": {"name": "wide_deep", "hidden": [1024, 512]},
}


def main() -> None:
    parser = harness.parser("des_table2", __doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[512, 2048], choices=list(PAPER))
    parser.add_argument("--models", nargs="+", default=list(SUMMED), choices=list(SUMMED))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--windows", type=int, default=2)
    options = parser.parse_args()
    report = harness.Report("des_table2", options)
    formulas(report)
    reason = network.missing()
    if reason is not None:
        report.skip("measured bytes", reason)
    elif options.batches:
        with tempfile.TemporaryDirectory() as directory:
            measured(report, options, Path(directory))
    if "GIRIH_DATA" in os.environ:
        narrow(report)
    else:
        report.skip("narrow data", "set GIRIH_DATA to the directory of the public data sets")
    report.finish()


def formulas(report: harness.Report) -> None:
    """All cells from the cost formulas of §4."""
    table = report.table(
        "Table 2 by its formulas, % saved",
        {"batch": "{:,}", "unique": "{:,}"}
        | {f"{m}{side}": "{:.3f}" for m in ("LR", "FM(2)", "DNN") for side in ("", ", paper")}
        | {"largest deviation": "{:.4f}"},
    )
    for batch, (unique, *printed) in PAPER.items():
        found = [
            100 * des.saving(batch, unique, width=1, columns=1),
            100 * des.saving(batch, unique, width=DIM, columns=DIM + 1),
            100 * des.saving(
                batch, unique, width=DIM, columns=OUTPUTS, projection_bytes=FIRST_LAYER_BYTES
            ),
        ]  # fmt: skip
        row: dict[str, Any] = {"batch": batch, "unique": unique}
        for name, value, paper in zip(("LR", "FM(2)", "DNN"), found, printed, strict=True):
            row |= {name: value, f"{name}, paper": paper}
        row["largest deviation"] = max(abs(a - b) for a, b in zip(found, printed, strict=True))
        table.row(row)


def measured(report: harness.Report, options: argparse.Namespace, directory: Path) -> None:
    """Bytes a trainer sends in a step, model beside counted and measured ones."""
    unique = wide.write_wide(directory / "train.parquet", 2 * max(options.batches), options.batches)
    data = report.table("generated data", {"batch": "{:,}", "unique": "{:,}", "of the paper's": "{:.3f}"})
    for batch, count in unique.items():
        data.row({"batch": batch, "unique": count, "of the paper's": count / PAPER[batch][0]})
    cases = [
        (batch, model, mode)
        for batch in options.batches
        for model in options.models
        for mode in (*options.modes, "synchronous")
    ]
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    with network.network([f"t{rank}" for rank in range(TRAINERS)], None) as hosts:
        places = {f"trainer {rank}": hosts.places[f"t{rank}"] for rank in range(TRAINERS)}
        asked = [
            _asked(directory, *case, list(hosts.links.values()), options.steps, options.windows)
            for case in cases
        ]
        for case, each in zip(cases, train_all(asked, TRAINERS, places), strict=True):
            found[case] = each
            print(*case, _sent(each), flush=True)
    table = report.table(
        "bytes that a trainer sends a step",
        {"batch": "{:,}", "model": "{}", "strategy": "{}", "cost model": "{:,.0f}", "girih counts": "{:,.0f}",
         "off by %": "{:+.2f}", "on the wire": "{:,.0f}", "off %": "{:+.2f}", "off B": "{:+,.0f}",
         "packets": "{:,.0f}", "with headers": "{:,.0f}", "saved %": "{:.2f}"},
    )  # fmt: skip
    for case, each in found.items():
        batch, model, mode = case
        counted, sent, raw, packets = _sent(each)
        plan = each["summary"].get("plan", {})
        reference = found.get((batch, model, "replicated")) or found.get((batch, model, "split"))
        cost = _cost(batch, model, mode, each) if mode != "synchronous" else None
        if cost is not None and abs(plan["bytes_per_step"] - cost) > 1:
            report.not_identical(
                f"{case}: summary.json plans {plan['bytes_per_step']}, the cost model {cost}"
            )
        if cost is None and reference is not None:
            cost = reference["summary"]["plan"]["synchronous_bytes_per_step"]
        row = {"batch": batch, "model": model, "strategy": mode, "cost model": cost, "girih counts": counted}
        row |= {"on the wire": sent, "packets": packets, "with headers": raw}
        if cost:
            row |= {
                "off by %": 100 * (counted / cost - 1),
                "off %": 100 * (sent / cost - 1),
                "off B": sent - cost,
            }
        if mode != "synchronous":
            row["saved %"] = 100 * (1 - sent / _sent(found[batch, model, "synchronous"])[1])
        table.row(row)
    if len(options.batches) > 1:
        _slopes(report, options, found)


def _slopes(
    report: harness.Report,
    options: argparse.Namespace,
    found: Mapping[tuple[int, str, str], Mapping[str, Any]],
) -> None:
    """What grows with the batch, apart from what does not: gloo's headers and the agreement on a step's loss."""
    small, large = min(options.batches), max(options.batches)
    table = report.table(
        "bytes on the wire that an example more costs",
        {"model": "{}", "strategy": "{}", "cost model": "{:,.2f}", "measured": "{:,.2f}", "off %": "{:+.2f}",
         "whatever the batch, model": "{:,.0f}", "measured ": "{:,.0f}"},
    )  # fmt: skip
    for model in options.models:
        for mode in options.modes:
            costs = [_cost(batch, model, mode, found[batch, model, mode]) for batch in (small, large)]
            sents = [_sent(found[batch, model, mode])[1] for batch in (small, large)]
            slopes = [(b - a) / (large - small) for a, b in (costs, sents)]
            table.row(
                {
                    "model": model,
                    "strategy": mode,
                    "cost model": slopes[0],
                    "measured": slopes[1],
                    "off %": 100 * (slopes[1] / slopes[0] - 1),
                    "whatever the batch, model": costs[0] - small * slopes[0],
                    "measured ": sents[0] - small * slopes[1],
                }
            )


def _asked(
    directory: Path, batch: int, model: str, mode: str, links: Sequence[str], steps: int, windows: int
) -> dict[str, Any]:
    deep = {"hidden": [OUTPUTS, UPPER]} if model not in ("lr", "fm") else {}
    name = {"name": "synchronous"} if mode == "synchronous" else {"name": "substitution", "dense": mode}
    return {
        "config": wide.config(directory / "train.parquet", batch, {"name": model, **deep}, dim=DIM),
        "strategy": {**name, "trainers": TRAINERS},
        "warmup": steps,  # so that the first note is that of a window
        "steps": steps,
        "windows": windows,
        "links": list(links),
    }


def _cost(batch: int, model: str, mode: str, found: Mapping[str, Any]) -> float:
    upper = {"lr": 1, "fm": 1}.get(model, OUTPUTS + OUTPUTS * UPPER + UPPER + UPPER + 1)
    sizes = traffic.PartialSizes(summed=SUMMED[model], shared_parameters=upper, split=mode == "split")
    return traffic.substitution(batch, TRAINERS, sizes).total


def _sent(found: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Means over trainers, a step: what girih counts, payload on the wire, all bytes, packets."""
    summary, (whole,) = found["summary"], found["whole"]
    counted = sum(summary["wire_bytes"].values()) / TRAINERS / summary["steps"]
    raw = sum(sent for sent, _ in whole["link_bytes"].values()) / TRAINERS
    packets = sum(sent for sent, _ in whole["link_packets"].values()) / TRAINERS
    return counted, raw - HEADERS_BYTES * packets, raw, packets


def narrow(report: harness.Report) -> None:
    """Where substitution loses: few ids an example, many columns of the first layer. Predicted, by the plan of a run."""
    from strategy_quality import CASES, SUBSTITUTION

    table = report.table(
        "bytes that a trainer would send a step on Frappe (10 features of dim 10)",
        {
            "model": "{}",
            "batch": "{:,}",
            "substitution": "{:,}",
            "synchronous": "{:,}",
            "of synchronous": "{:.2f}×",
        },
    )
    cases = [(name, batch) for name in NARROW for batch in (2048, 8192)]
    asked = []
    for name, batch in cases:
        made = CASES["frappe/lr"].config(SUBSTITUTION, 1.0, 1, quick=False)
        made["train"] = {"seed": 1}
        made |= {"model": NARROW[name], "data": {**made["data"], "batch_size": batch}}
        strategy = {**SUBSTITUTION.strategy}
        asked.append({"config": made, "strategy": strategy, "warmup": 0, "steps": 1, "windows": 2})
    for (name, batch), each in zip(cases, train_all(asked, TRAINERS), strict=True):
        plan = each["summary"]["plan"]
        ours, theirs = plan["bytes_per_step"], plan["synchronous_bytes_per_step"]
        table.row(
            {
                "model": name,
                "batch": batch,
                "substitution": ours,
                "synchronous": theirs,
                "of synchronous": ours / theirs,
            }
        )


if __name__ == "__main__":
    main()

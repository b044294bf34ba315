"""PICASSO's Table IV and Figures 11 and 12: what packing, interleaving, caching and prefetching are worth, each left out alone.

Two trainers under ``synchronous``, a network namespace each (needs root), links of ``--rate``; workloads as ``picasso.py``
has them. Arms take turns, each with equal batches and steps, and equal results: none of the options changes what is
learnt. Start-up, and a warm-up in which the hot set is chosen, are not counted. Processes and links are sampled every
``--sample-ms``.

    girih bench picasso_table4
    girih bench picasso_table4 --workloads W&D --rate 200mbit
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import harness
import picasso
import sampler
from experiments import pictures, show
from picasso import Found
from pictures import Chart, write_picture

PAPER = {
    "W&D": {"all": 22_825, "without packing": 17_827, "without interleaving": 16_218, "without caching": 19_264},
    "CAN": {"all": 12_218, "without packing": 8_769, "without interleaving": 7_957, "without caching": 10_829},
    "MMoE": {"all": 2_546, "without packing": 2_270, "without interleaving": 1_319, "without caching": 2_401},
}  # fmt: skip
"""Samples/s of a node."""
SAMPLE_MS = 10.0


def main() -> None:
    parser = picasso.parser("picasso_table4", __doc__, batch=512, workloads=list(picasso.WORKLOADS), gpu=True)
    for name, default in picasso.INTERLEAVED.items():
        words = f"--{name.replace('_', '-')}"
        parser.add_argument(
            words, type=picasso.number_or_auto, default=default, metavar="N", help="a number, or auto"
        )
    parser.add_argument("--arms", nargs="+", help="of: all, without packing, …; default: each of them")
    parser.add_argument("--sample-ms", type=float, default=SAMPLE_MS)
    options = picasso.parsed(parser)
    arms = picasso.arms(options)
    chosen = options.arms or list(arms)
    if unknown := set(chosen) - set(arms):
        parser.error(f"--arms: no arm {sorted(unknown)}; there are {list(arms)}")
    report = harness.Report("picasso_table4", options)
    bench = picasso.Bench.of(options, "picasso-table4", sample_ms=options.sample_ms)
    reason = bench.missing()
    if reason is None:
        cases = {
            (name, arm): bench.case(f"{name}/{arm}", bench.workload(picasso.WORKLOADS[name]), arms[arm])
            for name in options.workloads
            for arm in chosen
        }
        found = bench.measured(cases)
        _say_differences(report)
        _show(report, found)
        _draw(options, found)
        print(bench.kept.told())
    else:
        report.skip("all", reason)
    report.finish()


def _say_differences(report: harness.Report) -> None:
    for what in (
        "the paper's caching is of rows in GPU memory over DRAM, with which all its arms but one are measured; here the tiers are"
        " those of --tiers, and this pair alone has them: the others have rows in memory",
        "an epoch's distinct batches are eight, which come again: shares of ids follow the law, new rows appear in the"
        " warm-up alone",
        "memory bandwidth is not seen: virtual machines hide the counters that it takes",
    ):
        report.not_identical(what)


def _show(report: harness.Report, found: Mapping[tuple[str, str], Sequence[Found]]) -> None:
    rows = []
    for (name, arm), runs in found.items():
        other = picasso.BASE.get(arm, "all")
        base, paper = found.get((name, other)), PAPER[name].get(arm)
        row = {"workload": name, "arm": arm, **picasso.columns(runs)}
        row["of all, or with caching"] = f"{picasso.beside(runs, base):.2f}" if base else ""
        row["paper"] = f"{paper / PAPER[name]['all']:.2f}" if paper else ""
        row |= _kept(runs)
        rows.append(row)
    show(report, "each part left out alone", list(rows[0]), [list(row.values()) for row in rows])
    sampled = [
        {"workload": name, "arm": arm, **_sampled(runs)}
        for (name, arm), runs in found.items()
        if "samples" in runs[0]
    ]
    if sampled:
        title = "samples: use of the cores and of the busiest link, as quantiles of time"
        show(report, title, list(sampled[0]), [list(row.values()) for row in sampled])


def _kept(runs: Sequence[Found]) -> dict[str, str]:
    summary, hot = runs[0]["summary"], picasso.hot_ratio(runs[0])
    sent = sum(summary["wire_bytes"].values()) / summary["num_examples"]
    return {
        "bytes sent an example": f"{sent:,.0f}",
        "hit ratio": "" if hot is None else f"{hot:.1%}",
        **picasso.planned(runs[0]),
    }


def _sampled(runs: Sequence[Found]) -> dict[str, str]:
    found = [run["samples"] for run in runs if "samples" in run]
    row = {"samples": f"{sum(each['num'] for each in found):,}", "every ms": f"{found[0]['every_ms']:.1f}"}
    for what in ("cores", "links"):
        if what in found[0]:
            for percent in (10, 50, 90):
                place = sampler.QUANTILES.index(percent)
                row[f"{what}, {percent} %"] = f"{sum(each[what][place] for each in found) / len(found):.0%}"
    row["resident GB: median, most"] = (
        f"{found[0]['rss_bytes']['median'] / 1e9:.2f}, {found[0]['rss_bytes']['most'] / 1e9:.2f}"
    )
    return row


def _draw(options: argparse.Namespace, found: Mapping[tuple[str, str], Sequence[Found]]) -> None:
    """How much of the time the cores, or the busiest link, were used less than so much (Figures 11 and 12)."""
    charts = []
    for name in options.workloads:
        for what, title in (("cores", "use of the cores"), ("links", "use of the busiest link")):
            series = {
                arm: [(100 * value, percent) for value, percent in zip(runs[0]["samples"][what], sampler.QUANTILES, strict=True)]
                for (of, arm), runs in found.items()
                if of == name and what in runs[0].get("samples", {})
            }  # fmt: skip
            if series:
                charts.append(Chart(f"{name}, {title}", "at most, %", "% of the time", series))
    if charts:
        write_picture(pictures(options) / "picasso-figures-11-12.svg", charts)


if __name__ == "__main__":
    main()

"""PICASSO's Table IV and Figures 11 and 12: what packing, interleaving, caching and prefetching are worth, each left out alone.

Two trainers under ``synchronous``, a network namespace each (needs root), links of ``--rate``; workloads as ``picasso.py``
has them. Arms take turns, each with equal batches and steps, and equal results: none of the options changes what is
learnt. Start-up, and a warm-up in which the hot set is chosen, are not counted. Processes and links are sampled every
``--sample-ms``.

    girih bench picasso_table4
    girih bench picasso_table4 --workloads W&D --rate 200mbit
    girih bench picasso_table4 --hosts benchmarks/picasso_hosts.toml --rounds 3 --json docs/results/picasso-table4.json

The last command has slow hosts with a delay. There the arms are one interleaving group and five, and one, two and four micro-batches: one number
differs at a time. It writes the part of ``docs/scale.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import harness
import pages
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
TITLE, BESIDE = "each part left out alone", "of all, or with caching"


def main() -> None:
    workloads = list(picasso.WORKLOADS)
    parser = picasso.parser("picasso_table4", __doc__, batch=512, workloads=workloads, gpu=True, hosts=True)
    pages.add_option(parser, page_parts)
    for name, default in picasso.INTERLEAVED.items():
        words = f"--{name.replace('_', '-')}"
        parser.add_argument(
            words, type=picasso.number_or_auto, default=default, metavar="N", help="a number, or auto"
        )
    parser.add_argument(
        "--arms",
        nargs="+",
        help=f"of: all, without packing, …; default with --hosts: {', '.join(picasso.VARIED)}; else all others",
    )
    parser.add_argument("--sample-ms", type=float, default=SAMPLE_MS)
    options = picasso.parsed(parser)
    arms = picasso.arms(options)
    chosen = options.arms or [
        name for name in arms if (name in picasso.VARIED) == (options.hosts is not None)
    ]
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
        if options.hosts is None:
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
        row[BESIDE] = f"{picasso.beside(runs, base):.2f}" if base else ""
        row["by round"] = ", ".join(f"{ratio:.2f}" for ratio in picasso.ratios(runs, base)) if base else ""
        row["paper"] = f"{paper / PAPER[name]['all']:.2f}" if paper else ""
        row |= _kept(runs)
        rows.append(row)
    show(report, TITLE, list(rows[0]), [list(row.values()) for row in rows])
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


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The part of ``docs/scale.md``: arms of slow hosts, compared with one interleaving group and one micro-batch."""
    lines = [
        [
            row["workload"], row["arm"], row["samples/s"], "" if row["arm"] == picasso.ONE else row[BESIDE], row["by round"],
            _published(row["workload"], row["arm"]), row["cores busy"], row["Mbit/s"], row["interleaving groups"], row["micro-batches"],
        ]
        for row in pages.rows(results, TITLE) if row["arm"] in picasso.VARIED
    ]  # fmt: skip
    header = (
        "workload", "arm", "samples/s", "× one group, one micro-batch", "each round", "published, whole interleaving", "cores busy",
        "busiest link, Mbit/s", "interleaving groups", "micro-batches",
    )  # fmt: skip
    measured = pages.table(header, lines)
    return {"slow hosts": pages.paragraphs(f"{pages.measured(results)}.", measured) if measured else None}


def _published(workload: str, arm: str) -> str:
    """Samples/s with both kinds of interleaving, as a multiple of those without."""
    paper = PAPER[workload]
    return "" if arm == picasso.ONE else f"{paper['all'] / paper['without interleaving']:.2f}"


if __name__ == "__main__":
    main()

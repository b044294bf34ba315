"""HT's Figures 3a, 4a and 8 to 11: samples/s by trainers, nets and groups, what each process does, and what each optimisation is worth.

Every process has a host of its own (a network namespace), whose link has the bandwidth of ``--rate`` in each direction
(``tc tbf``); needs root; the transport is TCP. DLRM over 26 categorical and 13 numeric features; a net's step has ``--batch``
examples, in all arms but those of ``batches``. With a ``--calibration``, operators of groups go where ``girih plan`` puts them for this
machine and those links; without, where it puts them for a machine that nobody measured. All processes share the cores of this
machine: what more trainers add in work, the others lose in time. With ``--cores`` each trainer, group server and dense server has a quota of processor time, so
that they do not share cores (``slow_hosts``), and groups are planned for such hosts. Embedding servers, embedding workers and loaders have none: the
paper has enough of them. Options that the strategy refuses are skipped, with what it
says. What is kept in ``--results`` is not run again.

    girih bench hierarchical_speed --calibration docs/results/prediction/calibration.json
    girih bench hierarchical_speed --parts ablation --rate 200mbit
    girih bench hierarchical_speed --parts ablation --size 4 --cores 0.15 --rate 150mbit --calibration docs/results/prediction/calibration.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fleet
import harness
import network
import pages
import slow_runs
from experiments import RUNNING_PARTS, Results, Run, add_options, results
from network import Host
from persia_wire import busiest, bytes_per_s, middle, short

from girih import strategies
from girih.app.run_config import RunConfig
from girih.errors import ConfigError
from girih.planner.calibration import Calibration
from girih.planner.plan import Plan

PARTS = {
    "trainers": "Figure 3a: a copy each, EASGD",
    "nets": "Figure 4a: of one trainer",
    "groups": "Figures 8 and 10: (trainers, group servers) of a group",
    "ablation": "Figure 11: one group",
    "batches": "§4.2: batch size and compression, one group",
}
AUTO = "compression where it pays"
BFLOAT16 = {"wire_activations": "bfloat16", "wire_dense_gradients": "bfloat16"}
ABLATION: dict[str, dict[str, Any]] = {
    "rules and refinement": {"tagging": "refined"},
    "no refinement": {"tagging": "rules"},
    "no rules, no refinement": {"tagging": "none"},
    "no FC splits": {"split_fc": False},
    "FC splits": {"split_fc": True},
    "bfloat16": BFLOAT16,
    "int8 activations, bfloat16 gradients": BFLOAT16 | {"wire_activations": "int8"},
    "int8 activations, top-k gradients": {"wire_activations": "int8", "wire_dense_gradients": "topk"},
    AUTO: {"wire_activations": "auto", "wire_dense_gradients": "auto"},
}
PAPER = {"no rules, no refinement": "less than 0.6"}
"""The only number of Figure 11 that the paper's text has."""
TITLES = {letter: role for letter, role in network.LETTERS.items() if letter in "tgd"}
"""Hosts whose processor and link the second table shows, and which ``--cores`` bounds."""
MODEL = {"name": "dlrm", "bottom_hidden": [512, 256], "hidden": [1024, 1024, 512]}
AHEAD = 8
"""Steps' worth of data beyond those that are measured: what is read ahead must not end the epoch."""
QUICK = {"batch": 32, "cardinality": 500, "most": 2, "rounds": 1, "warmup": 4, "steps": 2, "windows": 2}
QUICK_MODEL = {"name": "dlrm", "bottom_hidden": [8], "hidden": [16, 8]}

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        batch: examples of a net's step.
    """

    strategy: Mapping[str, Any]
    batch: int

    @property
    def trainers(self) -> int:
        return int(self.strategy["groups"] * self.strategy["trainers_per_group"])

    @property
    def servers(self) -> int:
        """Group servers."""
        return int(self.strategy["groups"] * self.strategy.get("servers_per_group", 0))


def main() -> None:
    parser = harness.parser("hierarchical_speed", __doc__)
    pages.add_option(parser, page_parts)
    add_options(parser, pictures=False)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="names of a part's arms; default: all")
    parser.add_argument("--rate", default="1gbit", help="of each link and direction, as tc writes it")
    parser.add_argument(
        "--most", type=int, default=4, help="trainers, and half the nets, of the largest arms"
    )
    parser.add_argument(
        "--size", type=int, default=2, help="trainers, and group servers, of a group of ablation and batches"
    )
    parser.add_argument(
        "--cores",
        type=float,
        help="of each trainer, group server and dense server; default: all share the cores",
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each packet that a host sends")
    parser.add_argument("--batch", type=int, default=512, help="examples of a net's step")
    parser.add_argument("--cardinality", type=int, default=50_000, help="ids that a feature may have")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE",
        help=f"of girih calibrate, by which groups are planned; without one the arm {AUTO!r} is left out",
    )  # fmt: skip
    fleet.add_windows(parser)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    if options.cores is not None and options.warmup < 2 * options.steps:
        parser.error(
            "--warmup: expected twice --steps or more, because hosts become slow after the first --steps steps"
        )
    calibrated = options.calibration and Calibration.read(options.calibration)
    report = harness.Report("hierarchical_speed", options)
    if options.cores is None:
        report.not_identical(
            f"all processes share {fleet.CORES} cores, where the paper's have machines of their own: samples/s by trainers or nets"
            " say what they cost each other, not what a cluster gains"
        )
    report.not_identical(
        "trainers share no step: samples/s are the first trainer's steps times the trainers, and what the others' processors and"
        " links do is what they did in its windows"
    )
    reason = network.missing(delay=options.delay_ms > 0, cores=options.cores is not None)
    if reason is None:
        kept = results(options, "hierarchical-speed", parts=RUNNING_PARTS)
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(options, kept, Path(directory), calibrated)
            bench.run_all(report)
        _show_speed(report, options, bench.found)
        _show_use(report, options, bench.found)
        print(kept.told())
    else:
        report.skip("all", reason)
    report.finish()


def arms(part: str, most: int, batch: int, size: int = 2) -> dict[str, Arm]:
    """Name → arm; the others are compared with the part's first.

    Args:
        size: trainers, and group servers, of a group of ``ablation`` and ``batches``.
    """
    counts = [2**power for power in range(most.bit_length())]
    group = {"trainers_per_group": 2, "servers_per_group": 2, "nets": 2}
    if part == "trainers":
        return {f"{trainers} × 1 net": _arm(batch, groups=trainers) for trainers in counts}
    if part == "nets":
        return {f"{nets} nets": _arm(batch, nets=nets) for nets in (*counts, 2 * most)}
    if part == "groups":
        pairs = {
            f"1 × ({size}, {size})": _arm(batch, trainers_per_group=size, servers_per_group=size, nets=2)
            for size in counts
        }
        several = {
            f"{groups} × (2, 2)": _arm(batch, groups=groups, **group)
            for groups in counts[1:]
            if 2 * groups <= most
        }
        easgd = {
            f"EASGD, {trainers} {'trainer' if trainers == 1 else 'trainers'}": _arm(
                batch, groups=trainers, nets=2
            )
            for trainers in counts
        }
        largest = list(pairs)[-1]
        whole = Arm({**pairs[largest].strategy, "split_fc": False}, batch)
        return pairs | {f"{largest}, no FC splits": whole} | several | easgd
    group |= {"trainers_per_group": size, "servers_per_group": size}
    if part == "ablation":
        return {name: _arm(batch, **group, **own) for name, own in ABLATION.items()}
    return {
        f"{size} examples, {name}": _arm(size, **group, **own)
        for size in (batch // 4, batch, 4 * batch)
        for name, own in (("float32", {}), ("bfloat16", BFLOAT16))
    }


def _arm(batch: int, **options: Any) -> Arm:
    strategy = {"name": "hierarchical", "groups": 1, "trainers_per_group": 1, "transport": "tcp"}
    return Arm(strategy | options, batch)


@dataclass
class Bench:
    """Runs, kept ones among them.

    Attributes:
        calibration: by which ``AUTO`` chooses.
        found: part and arm → its runs, one a round.
    """

    options: argparse.Namespace
    kept: Results
    directory: Path
    calibration: Calibration | None
    found: dict[tuple[str, str], list[Found]] = field(default_factory=dict)

    def run_all(self, report: harness.Report) -> None:
        """All rounds; in each, arms take turns."""
        options = self.options
        wanted = {
            (p, name): arm
            for p in options.parts
            for name, arm in arms(p, options.most, options.batch, options.size).items()
            if options.arms is None or name in options.arms
        }
        for key, arm in list(wanted.items()):
            if (reason := refused(arm)) is not None:
                report.skip(" / ".join(key), reason)
                del wanted[key]
            elif "auto" in arm.strategy.values():
                del wanted[key]
                if self.calibration is None:
                    report.skip(" / ".join(key), "it needs --calibration")
                    continue
                chosen = self._chosen(arm, self.calibration)
                wanted[key[0], f"{key[1]}: {' and '.join(chosen.values())}"] = Arm(
                    {**arm.strategy, **chosen}, arm.batch
                )
        for number in range(options.rounds):
            for key, arm in wanted.items():
                self.found.setdefault(key, []).append(self._run(key, arm, number))

    def _chosen(self, arm: Arm, calibration: Calibration) -> dict[str, str]:
        """The codecs that ``girih plan`` chooses, as options of the strategy."""
        wire = self._planned(arm, calibration).wire
        return {f"wire_{kind}": wire[kind] for kind in ("activations", "dense_gradients")}

    def _planned(self, arm: Arm, calibration: Calibration) -> Plan:
        task = self._task(arm)
        config = self._config(task, 4 * arm.batch * arm.trainers)
        settings = RunConfig.load(config, overrides=self._overrides(task, arm))
        return settings.planned(self._calibrated(arm, calibration))

    def _calibrated(self, arm: Arm, calibration: Calibration) -> Calibration:
        """The calibration of the hosts. A host with a tenth of a core is a host with one core, on a clock ten times as slow."""
        rate, cores = bytes_per_s(self.options.rate), self.options.cores
        if cores is None:
            return calibration.over(rate)
        one_core = replace(calibration, machine={**calibration.machine, "cores": 1})
        return one_core.over(rate / cores).spread(arm.trainers + arm.servers)

    def _held(self, arm: Arm) -> Path | None:
        """The plan that an arm's run holds: that of its group, where there is a calibration."""
        if self.calibration is None or "servers_per_group" not in arm.strategy:
            return None
        plan = self._planned(arm, self.calibration)
        file = self.directory / "plan.json"
        file.write_text(json.dumps(plan.to_dict()))
        return file

    def _run(self, key: tuple[str, str], arm: Arm, number: int) -> Found:
        options = self.options
        conditions = fleet.windows_of(vars(options)) | {"rate": options.rate}
        where = options.rate
        if options.cores is not None or options.delay_ms:
            slow = {"cores": options.cores, "delay_ms": options.delay_ms}
            conditions |= slow
            where = f"{where}, {options.cores or 'shared'} cores, {options.delay_ms:g} ms"
        if options.size != 2:
            where = f"{where}, groups of {options.size}"
        if self.calibration is not None and "servers_per_group" in arm.strategy:
            conditions["planned_for"] = options.rate
        run = Run("/".join((where, *key, str(number))), self._task(arm), arm.strategy, conditions)
        return self.kept.measure(run, lambda run: self._measured(run, arm))

    def _task(self, arm: Arm) -> dict[str, Any]:
        """What an arm trains."""
        task = {name: getattr(self.options, name) for name in ("cardinality", "dim")}
        return task | {"batch": arm.batch, "model": QUICK_MODEL if self.options.quick else MODEL}

    def _overrides(self, task: Mapping[str, Any], arm: Arm) -> tuple[str, ...]:
        return (
            fleet.strategy_override(arm.strategy),
            fleet.override("model", task["model"]),
            f"data.batch_size = {arm.batch * arm.trainers}",
        )

    def _config(self, task: Mapping[str, Any], rows: int) -> Path:
        """A config whose data have so many rows."""
        config = self.directory / str(rows) / "config.toml"
        if not config.exists():
            fleet.write_task(
                config.parent, rows=rows, cardinality=task["cardinality"], dim=task["dim"], shuffle=False
            )
        return config

    def _measured(self, run: Run, arm: Arm) -> dict[str, Any]:
        options, task = self.options, run.config
        steps = options.warmup + options.steps * options.windows + AHEAD + arm.strategy.get("nets", 1)
        config, held = self._config(task, steps * arm.batch * arm.trainers), self._held(arm)
        counts = {"trainer": arm.trainers, **strategies.create(dict(arm.strategy), "strategy").roles}
        speeds = {
            name: Host(options.rate, options.delay_ms, options.cores if name[0] in TITLES else None)
            for name in network.names_apart(counts)
        }
        with network.network(speeds) as hosts:
            plan = fleet.Plan(
                str(config),
                self._overrides(task, arm),
                **fleet.windows_of(vars(options)),
                hosts=network.apart(hosts),
                held=None if held is None else str(held),
                **slow_runs.bounds_of(hosts),
            )
            once = options.quick or options.cores is not None  # a relay of delays looks like a disturbance
            found = fleet.measure(plan, timeout_s=1800.0, tries=1 if once else fleet.TRIES)
        return short(found, hosts)


def refused(arm: Arm) -> str | None:
    """What the strategy says against an arm's options; None where it takes them."""
    try:
        strategies.create(dict(arm.strategy), "strategy")
    except ConfigError as error:
        return str(error).removeprefix("strategy: ")
    return None


def _show_speed(
    report: harness.Report, options: argparse.Namespace, found: Mapping[tuple[str, str], list[Found]]
) -> None:
    for part in options.parts:
        table = report.table(
            f"{part}, links of {options.rate} ({PARTS[part]})",
            {"arm": "{}", "samples/s": "{:,.0f}", "of the first": "{:.2f}×", "step ms": "{:.0f}", "CPU / cores ms": "{:.0f}",
             "busiest link ms": "{:.0f}", "activations B an example": "{:,.0f}", "dense B an example": "{:,.0f}",
             "dense staleness: median": "{}", "p99": "{}", "most": "{}", **fleet.DISTURBED},
        )  # fmt: skip
        base = None
        for (of, name), runs in found.items():
            if of == part:
                row = speed(runs, options.rate)
                base = base or row["samples/s"]
                disturbed = fleet.disturbance(*runs)
                table.row({"arm": name, **row, "of the first": row["samples/s"] / base, **disturbed})


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The part of ``docs/scale.md``: the ablation on slow hosts. None for results of shared cores."""
    found = pages.rows(results, "ablation") if results["options"].get("cores") else []
    lines = [
        [
            row["arm"], f"{row['samples/s']:,.0f}", f"{row['of the first']:.2f}", PAPER.get(row["arm"], "–"), f"{row['step ms']:,.0f}",
            f"{row['busiest link ms']:,.0f}", f"{row['activations B an example']:,.0f}", f"{row['dense B an example']:,.0f}",
        ]
        for row in found
    ]  # fmt: skip
    header = (
        "one group", "samples/s", "of the first", "published", "ms per step", "busiest link, ms", "activations, bytes per example",
        "gradients and parameters, bytes per example",
    )  # fmt: skip
    table = pages.table(header, lines)
    return {"slow hosts": pages.paragraphs(f"{pages.measured(results)}.", table) if table else None}


def speed(runs: list[Found], rate: str) -> dict[str, Any]:
    """Medians over all windows of all rounds; bytes and staleness of the first round."""
    summary = runs[0]["summary"]
    stale = summary["dense_staleness"]
    sent = {kind: summary["wire_bytes"][kind] / summary["num_examples"] for kind in ("activations", "dense")}
    return {
        "samples/s": middle(runs, lambda window: window["samples_per_s"]),
        "step ms": 1e3 * middle(runs, lambda window: window["step_s"]),
        "CPU / cores ms": 1e3 * middle(runs, lambda window: window["machine_cpu_s"]) / fleet.CORES,
        "busiest link ms": 1e3 * middle(runs, busiest) / bytes_per_s(rate),
        **{f"{kind} B an example": count for kind, count in sent.items()},
        "dense staleness: median": stale["median"],
        "p99": stale["p99"],
        "most": stale["max"],
    }


def _show_use(
    report: harness.Report, options: argparse.Namespace, found: Mapping[tuple[str, str], list[Found]]
) -> None:
    table = report.table(
        f"processor and link of each trainer, group server and dense server, links of {options.rate} (Figure 9)",
        {
            "part": "{}",
            "arm": "{}",
            "process": "{}",
            "cores": "{:.2f}",
            "link out": "{:.0%}",
            "link in": "{:.0%}",
        },
    )
    for (part, name), runs in found.items():
        for row in use(runs, options.rate):
            table.row({"part": part, "arm": name, **row})


def use(runs: list[Found], rate: str) -> list[dict[str, Any]]:
    """What each process that computes on dense parameters uses: cores, and shares of its link's bandwidth."""
    rows = []
    for host in runs[0]["windows"][0]["link_bytes"]:
        if host[0] not in TITLES:
            continue
        title = f"{TITLES[host[0]]} {host[1:]}"
        row: dict[str, Any] = {
            "process": title,
            "cores": middle(runs, lambda window, title=title: window["cpu_s_each"][title] / window["step_s"]),
        }
        for way, name in enumerate(("link out", "link in")):
            row[name] = middle(
                runs, lambda window, host=host, way=way: window["link_bytes"][host][way] / window["step_s"]
            ) / bytes_per_s(rate)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()

"""HT's Figures 3, 4 and 7, and Model-B: normalised entropy by trainers with a dense copy each, by nets, by groups, and by bits.

    GIRIH_DATA=... girih bench hierarchical_quality [--data kuairand] [--parts nets trainers] [--counts 2 4] [--quick]

All arms train on the same examples once, each update on as many: a net's step takes the examples of one update, so that copies share
the updates out among themselves, as the paper's do. Learning rates (sparse and dense by one factor) are chosen for each arm by
itself: the best normalised entropy on validation data with seed 1; seeds 2 to 4 are reported, with the weights that were best
on validation data. Rates are constant, or, where data is ``-decayed``, fall linearly to nothing, since the mean of copies is less
noisy than one copy at the same rate. ``trainers``: the paper's EASGD system (§2.2, Figure 3), every trainer with one net and a copy. ``nets``: nets
of one trainer, on one copy (Figure 4). ``groups``: as many trainers as the last of ``--counts``, in groups with two group servers
each, beside as many trainers of EASGD (Figure 7). ``easgd``: as many trainers of EASGD, whose α and period are chosen on validation data with seed 1
too: first α, then the period, then the rates again. ``eight_bits``: one trainer, and one group of as many as the last of ``--counts``, whose
fully connected layers have an 8-bit forward pass, as Model-B's have (§5.1). Quality only: what else the machine does changes no figure but the staleness that there happens to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import harness
from experiments import (
    Results,
    Run,
    add_options,
    find_data,
    pictures,
    results,
    show,
    spread,
    trained,
    tried,
    tuned,
)
from pictures import Chart, write_picture
from strategy_quality import CASES, MOST_FACTORS, NUM_TRAIN, REPORTED, TUNED, Arm, generate

METRIC = "normalized_entropy"
DATA = {
    "kuairand": replace(CASES["kuairand/dnn"], update=64, passes=1),
    "generated": replace(CASES["generated/dnn"], update=512),
}
"""One pass, as the paper's, and small updates: eight copies are to be averaged more than a few times."""
DECAYED = "-decayed"
DATA |= {
    "kuairand" + DECAYED: DATA["kuairand"],
    "generated" + DECAYED: replace(DATA["generated"], factors=(2.0, 4.0, 8.0)),
}
PARTS = ("trainers", "nets", "groups", "easgd", "eight_bits")
SERVERS_PER_GROUP = 2
ONE = "one trainer, one net"
ALPHA, EVERY = 0.9, 10
"""Defaults of girih: α is ``ALPHA`` / copies, and a copy is averaged every ``EVERY`` steps."""
FROM_DEFAULTS = (1 / 3, 1.0, 3.0)
"""Factors of both that are tried first."""
TUNED_EASGD = ", α = "
EIGHT_BITS = {"dense_forward": "int8"}
BITS = ", 8 bits forward"

Found = Mapping[str, Any]
HEADER = [
    "data", "arm", "dense copies", "rates ×", "updates", "of each copy", "test NE", "over one trainer's, %",
    "over EASGD's of as many trainers, %", "test AUC", "last validation NE", "dense staleness: median, p99, most",
    "updates of rows since read: mean", "over tuned EASGD's of as many trainers, %",
]  # fmt: skip


def main() -> None:
    parser = harness.parser("hierarchical_quality", __doc__)
    add_options(parser)
    parser.add_argument("--data", nargs="+", default=["kuairand", "generated"], choices=list(DATA))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--counts", nargs="+", type=int, default=[2, 4, 8], help="of trainers, and of nets")
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[1, 2, 4], help="of as many trainers as the last count"
    )
    options = parser.parse_args()
    if min(options.counts) < 2:
        parser.error(f"--counts {min(options.counts)}: expected 2 or more; one is always trained")
    uneven = [groups for groups in options.groups if options.counts[-1] % groups]
    if uneven:
        parser.error(f"--groups {uneven[0]}: cannot share {options.counts[-1]} trainers evenly")
    report = harness.Report("hierarchical_quality", options)
    if any(DATA[data].data == "kuairand" for data in options.data):
        find_data(parser)
    if any(DATA[data].data == "generated" for data in options.data):
        generate()
    kept = results(options, "hierarchical-quality")
    rows, rates, chosen, charts = [], [], [], []
    for data in options.data:
        runs = {
            name: _trained(data, name, arm, kept, quick=options.quick)
            for name, arm in arms(options.parts, options.counts, options.groups).items()
        }
        if "easgd" in options.parts:
            name, arm = _tuned_easgd(data, options.counts[-1], kept, quick=options.quick)
            runs[name] = _trained(data, name, arm, kept, quick=options.quick)
        rows += [_row(data, name, runs) for name in runs]
        rates += [[data, name, tried(kept, f"{data}/{name}", TUNED, _told)] for name in runs]
        chosen += _tried_easgd(data, kept)
        drawn = {
            name: found for name, found in runs.items() if not name.endswith(BITS) and TUNED_EASGD not in name
        }
        charts += [] if options.parts == ["eight_bits"] else _charts(data, drawn)
    show(report, "normalised entropy by trainers, nets and groups", HEADER, rows)
    show(
        report, f"how rates were chosen, seed {TUNED}", ["data", "arm", "rates ×: best validation NE"], rates
    )
    if chosen:
        title = f"how α and the period of EASGD were chosen, seed {TUNED}"
        show(report, title, ["data", "arm", "rates ×", "best validation NE"], chosen)
    print(kept.told())
    if charts:
        write_picture(pictures(options) / "hierarchical-quality.svg", charts)
    report.finish()


def arms(parts: Sequence[str], counts: Sequence[int], groups: Sequence[int]) -> dict[str, Arm]:
    """Name → arm, the one that others are held against first.

    Args:
        counts: of trainers, and of nets; all arms of ``groups`` have as many trainers as the last says.
        groups: how many there are, in each arm of that part.
    """
    most = counts[-1]
    made = {ONE: _arm(groups=1)}
    if "nets" in parts:
        made |= {f"{nets} nets of one trainer": _arm(groups=1, nets=nets) for nets in counts}
    if "trainers" in parts:
        made |= {easgd(trainers): _arm(groups=trainers) for trainers in counts}
    if "easgd" in parts:
        made |= {easgd(most): _arm(groups=most)}
    if "groups" in parts:
        made |= {easgd(most): _arm(groups=most)}
        made |= {_title(count, most // count): _group(count, most // count) for count in groups}
    if "eight_bits" in parts:
        whole = {ONE: made[ONE], _title(1, most): _group(1, most)}
        made |= {easgd(most): _arm(groups=most), **whole}
        made |= {f"{name}{BITS}": replace(arm, train=EIGHT_BITS) for name, arm in whole.items()}
    return made


def _title(groups: int, trainers: int) -> str:
    return f"{groups} {'group' if groups == 1 else 'groups'} of {trainers} trainers"


def _group(groups: int, trainers: int) -> Arm:
    return _arm(groups=groups, trainers_per_group=trainers, servers_per_group=SERVERS_PER_GROUP)


def easgd(trainers: int) -> str:
    """The name of the arm with so many trainers, each of which has a copy."""
    return f"{trainers} trainers, EASGD"


def _arm(*, groups: int, trainers_per_group: int = 1, **options: int) -> Arm:
    strategy = {"name": "hierarchical", "groups": groups, "trainers_per_group": trainers_per_group, **options}
    return Arm(strategy, per_step=groups * trainers_per_group)


def config(data: str, arm: Arm, factor: float, seed: int, *, quick: bool) -> dict[str, Any]:
    """The config of one run, without ``[strategy]``."""
    made = DATA[data].config(arm, factor, seed, quick=quick)
    made["train"]["early_stopping"] = {"metric": METRIC, "patience": 1000}
    if data.endswith(DECAYED):
        steps = math.ceil(NUM_TRAIN[DATA[data].data] / made["data"]["batch_size"])
        made["train"]["lr_schedule"] = {
            "name": "LinearLR", "start_factor": 1.0, "end_factor": 0.0, "total_iters": steps, "interval": "step"
        }  # fmt: skip
    return made


def best(run: Found) -> float:
    """The best normalised entropy on validation data."""
    return float(min(entropy for _, entropy in run["curve"]))


def _told(run: Found) -> str:
    return f"{best(run):.5f}"


def _tuned_easgd(data: str, trainers: int, kept: Results, *, quick: bool) -> tuple[str, Arm]:
    """The name and the arm of EASGD with the best α, and then the best period, at the rates that are best for the defaults."""
    arm = _arm(groups=trainers)
    factor = _best_factor(data, easgd(trainers), arm, kept, quick=quick)

    def of(alpha: float, every: float) -> tuple[str, Arm]:
        own = {
            "elastic_rate": min(1.0, alpha * ALPHA / trainers),
            "average_every_steps": max(1, round(every * EVERY)),
        }
        name = f"{easgd(trainers)}{TUNED_EASGD}{own['elastic_rate']:.4g}, every {own['average_every_steps']} steps"
        return name, replace(arm, strategy={**arm.strategy, **own})

    def score(alpha: float, every: float) -> float:
        return -best(_train(data, *of(alpha, every), factor, TUNED, kept, quick=quick))

    first, grow = FROM_DEFAULTS[: 1 if quick else None], not quick
    alpha = tuned(lambda alpha: score(alpha, 1.0), first, MOST_FACTORS, grow=grow)
    return of(alpha, tuned(lambda every: score(alpha, every), first, MOST_FACTORS, grow=grow))


def _tried_easgd(data: str, kept: Results) -> list[list[str]]:
    """What was tried of α, period and rates."""
    rows = {}
    for run in kept.used:
        name, factor, seed = run["name"].rsplit("/", 2)
        if name.startswith(f"{data}/") and TUNED_EASGD in name and seed == str(TUNED):
            rows[run["name"]] = [data, name.partition("/")[2], factor[1:], _told(run)]
    return list(rows.values())


def _train(
    data: str, name: str, arm: Arm, factor: float, seed: int, kept: Results, *, quick: bool
) -> dict[str, Any]:
    run = Run(f"{data}/{name}/x{factor:g}/{seed}", config(data, arm, factor, seed, quick=quick), arm.strategy)
    how: Callable[[Run], Found] = partial(trained, metric=METRIC)
    return kept.train([run], how)[0]


def _best_factor(data: str, name: str, arm: Arm, kept: Results, *, quick: bool) -> float:
    """The arm's own best rates."""
    return tuned(
        lambda factor: -best(_train(data, name, arm, factor, TUNED, kept, quick=quick)),
        DATA[data].factors[: 1 if quick else None],
        MOST_FACTORS,
        grow=not quick,
    )


def _trained(data: str, name: str, arm: Arm, kept: Results, *, quick: bool) -> list[dict[str, Any]]:
    """Runs of the reported seeds, at the arm's own best rates."""
    factor = _best_factor(data, name, arm, kept, quick=quick)
    return [
        _train(data, name, arm, factor, seed, kept, quick=quick) for seed in REPORTED[: 1 if quick else None]
    ]


def _row(data: str, name: str, runs: Mapping[str, Sequence[Found]]) -> list[str]:
    found, strategy = runs[name], runs[name][0]["asked"]["strategy"]
    trainers = strategy["groups"] * strategy["trainers_per_group"]
    updates = found[0]["steps"] * trainers
    peers = None if strategy["trainers_per_group"] == 1 else runs[easgd(trainers)]
    better = next((of for other, of in runs.items() if other.startswith(easgd(trainers) + TUNED_EASGD)), None)
    stale = [run["dense_staleness"] for run in found if "dense_staleness" in run]
    return [
        data, name, str(strategy["groups"]), found[0]["name"].rsplit("/", 2)[1][1:], f"{updates:,}",
        f"{updates // strategy['groups']:,}", spread([run[METRIC] for run in found]),
        "" if name == ONE else _over(found, runs[ONE]), "" if peers is None else _over(found, peers),
        spread([run["auc"] for run in found]), spread([run["curve"][-1][1] for run in found]),
        ", ".join(str(max(each[part] for each in stale)) for part in ("median", "p99", "max")) if stale else "0, 0, 0",
        f"{mean(run['updates_since_read_mean'] for run in found):.1f}", "" if better is None or better is found else _over(found, better),
    ]  # fmt: skip


def over(found: Sequence[Found], reference: Sequence[Found]) -> list[float]:
    """Per cent by which the test data's normalised entropy is above the reference's, seed by seed."""
    return [100 * (run[METRIC] / other[METRIC] - 1) for run, other in zip(found, reference, strict=True)]


def _over(found: Sequence[Found], reference: Sequence[Found]) -> str:
    """Mean over seeds ± its standard error."""
    each = over(found, reference)
    error = f" ± {stdev(each) / len(each) ** 0.5:.3f}" if len(each) > 1 else ""
    return f"{mean(each):+.3f}{error}"


def _charts(data: str, runs: Mapping[str, Sequence[Found]]) -> list[Chart]:
    """Trainers and nets in one chart; groups in another."""
    lines: dict[str, list[tuple[float, float]]] = {}
    groups: dict[str, list[tuple[float, float]]] = {}
    for found in runs.values():
        strategy = found[0]["asked"]["strategy"]
        copies, nets, trainers = strategy["groups"], strategy.get("nets", 1), strategy["trainers_per_group"]
        height = mean(over(found, runs[ONE]))
        if "servers_per_group" in strategy:
            peers = mean(over(runs[easgd(copies * trainers)], runs[ONE]))
            groups.setdefault(f"{copies * trainers} trainers in groups", []).append((copies, height))
            groups["as many, a copy each (EASGD)"] = [(copies * trainers, peers)]
        elif nets > 1:
            lines.setdefault("nets of one trainer, one copy", [(1, 0.0)]).append((nets, height))
        elif copies > 1:
            lines.setdefault("trainers, a copy each (EASGD)", [(1, 0.0)]).append((copies, height))
    title = "normalised entropy over one trainer's, %"
    both = (("trainers, or nets", lines), ("groups", groups))
    return [Chart(data, x_title, title, series) for x_title, series in both if series]


if __name__ == "__main__":
    main()

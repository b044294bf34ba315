"""Runs on slow hosts: where processes live, how a contestant is measured, and the columns of its row.

Processes start at full speed. Hosts get their cores and links at the end of the first ``steps`` steps, see ``fleet.Bounds``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import fleet
import hosts_file
import network
import slow_peers
from hosts_file import Kinds

from girih import strategies
from girih.cluster.roles import RoleName
from girih.strategies.remote import COUNT_OPTIONS

MODEL = {"name": "dlrm", "bottom_hidden": [512, 256], "hidden": [512, 256]}
"""That of ``train_sides``."""
ROW_OPTIMIZER = {"name": "rowwise_adagrad", "lr": 0.05}
WARMUP_WINDOWS = 2
"""The first is not slow yet."""
OWN_PACE = ("asynchronous", "hierarchical")
"""Strategies whose trainers do not wait for each other: their rates are added."""
MORE_WINDOWS = 2
"""By how many times its windows such a run is longer, because trainer 0 may be the slowest."""
AHEAD = 24
"""Batches of data beyond those of the steps: what is read ahead must not end the epoch."""
BYTES = ("ids", "embeddings", "gradients", "partials", "dense", "activations")
Row = dict[str, Any]

WHERE = {"trainers": "{}", "cores": "{:g}", "gbit": "{:g}", "delay ms": "{:g}"}
RATES = {
    "samples/s": "{:,.0f}", "lowest": "{:,.0f}", "highest": "{:,.0f}", "step ms": "{:.0f}",
    "staleness": "{:.2f}", "staleness, most": "{}",
}  # fmt: skip
USE = {
    "bytes an example": "{:,.0f}", **{f"{kind}, bytes": "{:,.0f}" for kind in BYTES},
    **{f"CPU of a {role}": "{:.0%}" for role in RoleName},
    "CPU of a host": "{:.0%}", "CPU of the busiest": "{:.0%}", "use of a link": "{:.0%}", "of the busiest": "{:.0%}",
    **{f"use of links of a {role}": "{:.0%}" for role in RoleName},
}  # fmt: skip
"""Shares are of the cores of a process's host, and of the rate of a link in its busier direction."""
COST = {**fleet.DISTURBED, "wall s": "{:.0f}"}


@dataclass(frozen=True)
class Bench:
    """What all runs share.

    Attributes:
        options: of the command. directory: for data.
    """

    options: argparse.Namespace
    directory: Path

    def chosen(self, contestant: str) -> bool:
        """True if ``--contestants`` names it, or names none."""
        return self.options.contestants is None or contestant in self.options.contestants

    def girih(self, strategy: Mapping[str, Any], kinds: Kinds) -> Row:
        """Measures a strategy; the trainers are as many as hosts with that role."""
        options, trainers = self.options, hosts_file.num_hosts(kinds, hosts_file.TRAINER)
        counts = {hosts_file.TRAINER: trainers, **strategies.create(dict(strategy), "strategy").roles}
        places = hosts_file.placed(kinds, counts)
        own_pace = strategy["name"] in OWN_PACE
        with tempfile.TemporaryDirectory(dir=self.directory) as run, hosts_of(kinds) as hosts:
            plan = fleet.Plan(
                str(self._config()),
                (
                    fleet.strategy_override(strategy),
                    fleet.override("model", MODEL),
                    fleet.override("sparse_optimizer", ROW_OPTIMIZER),
                    f"data.batch_size = {options.batch * trainers}",
                ),
                **self._windows(),
                hosts=hosts_file.specs(hosts, places),
                keep=str(Path(run, "run")) if own_pace else None,
                more_steps=MORE_WINDOWS * options.windows * options.steps if own_pace else 0,
                **bounds_of(hosts),
            )
            found = fleet.measure(plan, timeout_s=options.timeout_s, tries=options.tries)
        if own_pace:
            for window in found["windows"]:
                window["samples_per_s"] = sum(window["own_samples_per_s"].values())
        summary = found["summary"]
        row = _row(found, kinds, places, hosts)
        if not counts.keys() <= {hosts_file.TRAINER}:
            row |= {"staleness": summary["staleness_mean"], "staleness, most": summary["staleness_max"]}
        row |= {
            f"{kind}, bytes": sent / summary["num_examples"] for kind, sent in summary["wire_bytes"].items()
        }
        return row

    def peer(self, name: str, kinds: Kinds) -> Row:
        """Measures another system, whose processes are trainers alone."""
        options, trainers = self.options, hosts_file.num_hosts(kinds, hosts_file.TRAINER)
        places = hosts_file.placed(kinds, {hosts_file.TRAINER: trainers})
        with hosts_of(kinds) as hosts:
            specs = list(hosts_file.specs(hosts, places).values())
            plan = {**self._windows(), **bounds_of(hosts), "config": "", "overrides": ()}
            task = slow_peers.Task(
                str(self._config()), options.batch * trainers, name, options.dim, options.cardinality, trainers,
                specs[0].host, slow_peers.free_port(), plan,
            )  # fmt: skip
            found = slow_peers.measure(task, specs, timeout_s=options.timeout_s)
        return _row(found, kinds, places, hosts)

    def _windows(self) -> dict[str, int]:
        steps = self.options.steps
        return {"warmup": WARMUP_WINDOWS * steps, "steps": steps, "windows": self.options.windows}

    def _config(self) -> Path:
        """Data for one epoch of the most trainers that is as long as a run."""
        options = self.options
        file = self.directory / "config.toml"
        if not file.exists():
            steps = (WARMUP_WINDOWS + (1 + MORE_WINDOWS) * options.windows) * options.steps + AHEAD
            most = max(options.counts)
            fleet.write_task(
                self.directory, rows=steps * options.batch * most, cardinality=options.cardinality, dim=options.dim,
                shuffle=False,
            )  # fmt: skip
        return file


def served(kinds: Kinds) -> dict[str, Any]:
    """Options of strategies with embedding servers: a process on each host with its role, and no more loaders than trainers."""
    counts = {option: hosts_file.num_hosts(kinds, role) for role, option in COUNT_OPTIONS.items()}
    trainers = hosts_file.num_hosts(kinds, hosts_file.TRAINER)
    return {"transport": "tcp", **counts, "loaders": min(trainers, counts["loaders"])}


def contestants(kinds: Kinds) -> dict[str, dict[str, Any]]:
    """Name → ``[strategy]`` of each strategy on these hosts."""
    trainers = hosts_file.num_hosts(kinds, hosts_file.TRAINER)
    remote = {"trainers": trainers, **served(kinds)}
    pairs = max(1, trainers // 2)
    group = {
        "groups": pairs,
        "trainers_per_group": trainers // pairs,
        "servers_per_group": trainers // pairs,
        "nets": 2,
    }
    return {
        "synchronous": {"name": "synchronous", "trainers": trainers},
        **{f"hybrid, τ = {tau}": {"name": "hybrid", "staleness": tau, **remote} for tau in (0, 4, 16)},
        "asynchronous, τ = 4": {"name": "asynchronous", "staleness": 4, **remote},
        "substitution": {"name": "substitution", "trainers": trainers},
        "hierarchical": {"name": "hierarchical", **served(kinds), **group},
    }


def where(kinds: Kinds) -> Row:
    """The columns that name the hosts."""
    first = kinds[0]
    trainers = hosts_file.num_hosts(kinds, hosts_file.TRAINER)
    return {"trainers": trainers, "cores": first.cores, "gbit": first.gbit, "delay ms": first.delay_ms}


@contextmanager
def hosts_of(kinds: Kinds) -> Iterator[network.Hosts]:
    with network.network(
        {name: hosts_file.shaped(kind) for name, kind in hosts_file.named(kinds).items()}
    ) as hosts:
        yield hosts


def bounds_of(hosts: network.Hosts) -> dict[str, Any]:
    """The part of a plan that slows hosts down, and counts their use."""
    return {
        "links": tuple(hosts.links.values()),
        "bounds": hosts.limits(),
        "no_bounds": hosts.limits(lifted=True),
        "usage": {name: str(group.usage_file) for name, group in hosts.groups.items()},
    }


def _row(found: Mapping[str, Any], kinds: Kinds, places: Mapping[str, str], hosts: network.Hosts) -> Row:
    """Columns of a run; medians of its windows."""
    named, links = hosts_file.named(kinds), {link: name for name, link in hosts.links.items()}
    windows = found["windows"]
    rates = [window["samples_per_s"] for window in windows]
    sent, host_use, link_use = [], dict[str, list[float]](), dict[str, list[float]]()
    role_use: dict[str, list[float]] = {}
    for window in windows:
        step_s = window["step_s"]
        sent.append(
            sum(both[0] for both in window["link_bytes"].values()) / (window["samples_per_s"] * step_s)
        )
        for host, used_s in window["hosts_cpu_s"].items():
            host_use.setdefault(host, []).append(used_s / step_s / named[host].cores)
        for link, both in window["link_bytes"].items():
            capacity = named[links[link]].gbit * 1e9 / 8 * step_s
            link_use.setdefault(links[link], []).append(max(both) / capacity)
        for title, used_s in window["cpu_s_each"].items():
            share = used_s / step_s / named[places[title]].cores
            role_use.setdefault(title.rpartition(" ")[0], []).append(share)
    its_hosts = {
        role: {host for title, host in places.items() if title.rpartition(" ")[0] == role}
        for role in role_use
    }
    of_hosts, of_links = ([mean(each) for each in use.values()] for use in (host_use, link_use))
    return {
        "samples/s": median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "step ms": 1e3 * fleet.median(found, "step_s"),
        "bytes an example": median(sent),
        **{f"CPU of a {role}": mean(shares) for role, shares in role_use.items()},
        "CPU of a host": mean(of_hosts),
        "CPU of the busiest": max(of_hosts),
        "use of a link": mean(of_links),
        "of the busiest": max(of_links),
        **{
            f"use of links of a {role}": mean(mean(link_use[host]) for host in its)
            for role, its in its_hosts.items()
        },
        **fleet.disturbance(found),
    }

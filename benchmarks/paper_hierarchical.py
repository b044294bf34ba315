"""HT's Figures 8 and 10 at the paper's size: groups of trainers and group servers, next to trainers with a copy each.

The paper states cores of a trainer (§2.3), hundreds of features and hundreds of megabytes (§5), and numbers of hosts (§5.1, §5.2).
It does not state links, layers, dims, examples of a step, nets or the period of averaging.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import paper_facts
from paper_cases import Case, Published
from paper_facts import Law, Task
from paper_graphs import Edit, Step, edits, parallel_requests, spread_over_servers, without_overheads

from girih.planner.calibration import Calibration
from girih.planner.simulator.hosts import HostGroup, Hosts

CORES, GBIT, NETS, SHARE, DIM = 18, 25, 9, 512, 32
FEATURES, NUMERIC = 200, 100
MODEL = {"name": "dlrm", "bottom_hidden": [1024, 512], "hidden": [4096, 4096, 2048]}
SMALL = {"name": "dlrm", "bottom_hidden": [8], "hidden": [16, 8]}
EASGD = "EASGD, 40 trainers"
MORE_NETS = "twice as many nets"
LINKS = "links of 100 Gbit/s"
BUSIEST = "all bytes of a net pass one server"
CHANGES: dict[str, tuple[Edit, ...]] = {
    MORE_NETS: (),
    BUSIEST: (),
    LINKS: (),
    "requests in parallel": (parallel_requests,),
    "and no overhead of Python": (parallel_requests, without_overheads),
}


@dataclass
class Hierarchical:
    """What its figures share."""

    calibration: Calibration
    quick: bool = False
    passes: str = "calibrated products"
    steps: int = 24
    _task: Task | None = field(default=None, repr=False)

    def base(self, case: Case) -> str:
        """No arm."""
        return ""

    def graph(self, case: Case, groups: int, trainers: int, servers: int) -> Step:
        """A step: a host for each trainer, each group server and each other process; enough of these (§5)."""
        total = groups * trainers
        servers_of_rows = math.ceil(total / 4)
        strategy = paper_facts.create(
            {
                "name": "hierarchical", "groups": groups, "trainers_per_group": trainers, "servers_per_group": servers,
                "nets": 2 * NETS if case.change == MORE_NETS else NETS, "transport": "tcp", "dense_servers": groups, "embedding_servers": servers_of_rows,
                "embedding_workers": total, "loaders": total,
            }
        )  # fmt: skip
        gbit = 100 if case.change == LINKS else GBIT
        if self._task is None:
            self._task = _dlrm(quick=self.quick)
        facts = self._task.facts(
            strategy, total, SHARE, self._machines(groups * (trainers + servers), gbit), CORES
        )
        graph = strategy.step_graph(facts)
        if graph is None:
            raise SystemExit(f"{case}: no speed is predicted")
        one = {"cores": CORES, "memory_gb": 64, "gbit": gbit}
        groups_of = [HostGroup(count=total, roles=("trainer",), **one)]
        if servers:
            groups_of.append(HostGroup(count=groups * servers, roles=("group-server",), **one))
        groups_of.append(HostGroup(count=total, roles=("embedding-worker", "loader"), **one))
        groups_of.append(HostGroup(count=servers_of_rows, roles=("embedding-server",), **one))
        if groups > 1:
            groups_of.append(HostGroup(count=groups, roles=("dense-server",), **one))
        step = Step(graph, facts, Hosts(tuple(groups_of)))
        first = (
            (lambda graph: spread_over_servers(graph, servers),) if servers and case.change != BUSIEST else ()
        )
        return step.edited(*first, *edits(CHANGES, case.change))

    def _machines(self, count: int, gbit: float) -> Calibration:
        """The calibration for the tagging, which divides the work by the cores of machines."""
        machine = {**self.calibration.machine, "cores": CORES}
        return replace(self.calibration.over(gbit * 1e9 / 8), machine=machine).spread(count)


@dataclass
class Figure8(Hierarchical):
    """Samples/s of groups of (6, 6) next to 40 trainers with a copy each."""

    name: str = "HT, Figure 8"
    x: str = "groups"
    is_linear: bool = False
    counts: tuple[int, ...] = (5, 8, 10)

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """The baseline, and groups."""
        for change in ["", BUSIEST, LINKS, *[*CHANGES][-2:]][: 1 if quick else None]:
            yield Case(self.name, "Model-A", EASGD, 40, change)
            for count in self.counts[-1:] if quick or change else self.counts:
                yield Case(self.name, "Model-A", "groups of (6, 6)", count, change)

    def base(self, case: Case) -> str:
        """The trainers with a copy each."""
        return EASGD

    def step(self, case: Case) -> Step:
        """A step of the baseline or of groups."""
        return self.graph(case, 40, 1, 0) if case.arm == EASGD else self.graph(case, int(case.x), 6, 6)

    def published(self, case: Case) -> Published:
        """§5.1: 1.6 times with ten groups (Model-A)."""
        if case.change:
            return Published()
        return Published(of_base={EASGD: 1.0}.get(case.arm, 1.6 if case.x == 10 else None))


@dataclass
class Figure10a(Hierarchical):
    """Samples/s by the number of groups of (6, 6)."""

    name: str = "HT, Figure 10a"
    x: str = "groups"
    is_linear: bool = True
    counts: tuple[int, ...] = (2, 4, 6, 8, 10)

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """By groups."""
        for count in self.counts[:2] if quick else self.counts:
            yield Case(self.name, "Model-A", "groups of (6, 6)", count)

    def step(self, case: Case) -> Step:
        """A step of groups."""
        return self.graph(case, int(case.x), 6, 6)

    def published(self, case: Case) -> Published:
        """§5.2: linear up to ten groups."""
        return Published(of_linear=1.0, shape="linear")


@dataclass
class Figure10b(Hierarchical):
    """Samples/s by trainers and group servers of each of eight groups."""

    name: str = "HT, Figure 10b"
    x: str = "trainers and servers of a group, each"
    is_linear: bool = True
    steps: int = 45
    counts: tuple[int, ...] = (2, 4, 6, 8, 10)

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """By nodes, and the ends with other assumptions."""
        for count in self.counts[:2] if quick else self.counts:
            yield Case(self.name, "Model-A", "eight groups", count)
        for change in () if quick else (BUSIEST, MORE_NETS, LINKS):
            for count in (self.counts[0], self.counts[-1]):
                yield Case(self.name, "Model-A", "eight groups", count, change)

    def step(self, case: Case) -> Step:
        """A step of groups."""
        return self.graph(case, 8, int(case.x), int(case.x))

    def published(self, case: Case) -> Published:
        """§5.2: less than linear."""
        return Published(
            of_linear=1.0 if case.x == 2 else None, shape="" if case.change else "less than linear"
        )


def _dlrm(*, quick: bool) -> Task:
    features, numeric = (10, 2) if quick else (FEATURES, NUMERIC)
    names = [f"c{place}" for place in range(features)]
    numbers: list[dict[str, Any]] = [{"name": f"x{place}", "kind": "numeric"} for place in range(numeric)]
    config = {
        "features": [*paper_facts.one_id(names, DIM), *numbers],
        "labels": {"names": ["click"]},
        "model": SMALL if quick else MODEL,
        "dense_optimizer": {"name": "adagrad"},
    }
    return Task(config, Law(1e6, 1.2), {})

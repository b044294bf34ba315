"""Simulates a step graph several times, and summarizes the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist

from girih.planner.simulator.draws import RUN_SPREAD, STEP_SPREAD, Draws
from girih.planner.simulator.hosts import Hosts
from girih.planner.simulator.run import Run, Span
from girih.planner.steps.graph import StepGraph

STEPS, RUNS = 40, 9
"""Steps of each trainer in a run, and runs."""
BUSY = 0.7
"""The busiest resource is the bottleneck if it is in use for this part of the time. Else steps wait for their path."""
PATH = "one step after the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The result. Speeds are medians and quantiles over runs, and the rest is of the middle run.

    Attributes:
        samples_per_s: training examples per second over all trainers. The others are quantiles: p5, p10, p90, p95.
        staleness_mean, staleness_p50, staleness_p99, staleness_max: over batches.
        bottleneck: the resource that decides the speed.
        core_s: role → core-seconds of its processes, in a step of all trainers.
        utilization: resource → the fraction of its capacity, or of the time, in use.
        queues: resource → mean number of activities, or of waiting requests.
        extrapolated: the reasons why this is beyond validated runs. Empty if it is not.
        spans: a timeline, if asked for.
    """

    samples_per_s: float
    samples_per_s_p5: float
    samples_per_s_p10: float
    samples_per_s_p90: float
    samples_per_s_p95: float
    staleness_mean: float
    staleness_p50: int
    staleness_p99: int
    staleness_max: int
    bottleneck: str
    core_s: Mapping[str, float]
    utilization: Mapping[str, float]
    queues: Mapping[str, float]
    extrapolated: tuple[str, ...] = ()
    spans: tuple[Span, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON, without the timeline. ``extrapolated`` is a truth value, with its reasons."""
        values = asdict(self)
        del values["spans"]
        return {
            **values,
            "extrapolated": bool(self.extrapolated),
            "extrapolated_because": list(self.extrapolated),
        }


def simulate(
    graph: StepGraph,
    hosts: Hosts,
    *,
    steps: int = STEPS,
    runs: int = RUNS,
    seed: int = 0,
    keys: float = 0.0,
    step_spread: float = STEP_SPREAD,
    run_spread: float = RUN_SPREAD,
    extrapolated: Sequence[str] = (),
    keeps_spans: bool = False,
) -> Simulated:
    """Simulates runs on hosts. Equal arguments give equal results.

    Args:
        steps: number of steps of each trainer in a run. runs: number of runs.
        seed: decides all random numbers. keys: unique keys of a trainer's step, which servers share unevenly.
        step_spread, run_spread: see :mod:`girih.planner.simulator.draws`.
    """
    done: list[tuple[float, Run]] = []
    for number in range(runs):
        draws = Draws(f"{seed} {number}", step_spread)
        # runs are spread evenly over the distribution of speeds, so few runs give stable quantiles
        speed = _speed((number + 0.5) / runs, run_spread)
        run = Run(graph, hosts, draws, steps=steps, speed=speed, keys=keys, keeps_spans=keeps_spans)
        run.go()
        done.append((_samples_per_s(graph, run), run))
    done.sort(key=lambda each: each[0])
    speeds = [each for each, _ in done]
    middle = done[len(done) // 2][1]
    utilization, queues = _use(middle)
    staleness = sorted(middle.log.staleness) or [0]
    busiest = max(utilization, key=lambda name: utilization[name])
    return Simulated(
        samples_per_s=quantile(speeds, 0.5),
        samples_per_s_p5=quantile(speeds, 0.05),
        samples_per_s_p10=quantile(speeds, 0.1),
        samples_per_s_p90=quantile(speeds, 0.9),
        samples_per_s_p95=quantile(speeds, 0.95),
        staleness_mean=sum(staleness) / len(staleness),
        staleness_p50=staleness[len(staleness) // 2],
        staleness_p99=staleness[math.ceil(0.99 * len(staleness)) - 1],
        staleness_max=staleness[-1],
        core_s=_core_s(graph, middle),
        bottleneck=busiest if utilization[busiest] >= BUSY else PATH,
        utilization=utilization,
        queues=queues,
        extrapolated=tuple(extrapolated),
        spans=tuple(middle.log.spans or ()),
    )


def quantile(ordered: Sequence[float], at: float) -> float:
    """Returns a quantile of n ordered values, each the middle of an n-th of the distribution. Goes not beyond them."""
    place = min(max(at * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _speed(at: float, spread: float) -> float:
    return math.exp(math.sqrt(math.log1p(spread * spread)) * NormalDist().inv_cdf(at)) if spread else 1.0


def _samples_per_s(graph: StepGraph, run: Run) -> float:
    """Returns the sum of the trainers' speeds, each between one of its first steps and its last step."""
    speed = 0.0
    for lane in range(run.cluster.trainers):
        ended = [at_s for at_s, trainer in run.log.ended if trainer == lane]
        begin = _first(graph, len(ended), run.steps)
        if len(ended) > 1:
            speed += (len(ended) - 1 - begin) / (ended[-1] - ended[begin])
    return graph.examples / run.cluster.trainers * speed


def _first(graph: StepGraph, ended: int, steps: int) -> int:
    return max(0, min(ended - 2, 2 * graph.in_flight, steps // 3))


def _core_s(graph: StepGraph, run: Run) -> dict[str, float]:
    """Returns role → core-seconds of a step, between the same steps. What was read ahead before them does not count."""
    spent, first = run.log.spent, run.cluster.trainers * _first(graph, run.steps, run.steps)
    before, after = spent[min(first, len(spent) - 2)], spent[-1]
    steps = max(1, len(spent) - 1 - first) / graph.trainers
    return {role: (seconds - before.get(role, 0.0)) / steps for role, seconds in after.items()}


def _use(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the utilization and the queue of the busiest resource of each kind.

    A trainer's thread that holds a step mostly waits for other resources, so it does not count.
    """
    cluster, now_s = run.cluster, run.engine.now_s
    holds = {each.takes for each in run.operations if each.takes}
    used: dict[str, float] = {}
    queued: dict[str, float] = {}

    def note(name: str, use: float, queue: float) -> None:
        if use >= used.get(name, 0.0):
            used[name], queued[name] = use, queue

    for host in cluster.hosts.values():
        host.cores.tick(now_s)
        core = host.cores
        note("cores", core.served / core.rate / now_s, core.waiting_s / now_s)
    for role, processes in cluster.processes.items():
        for process in processes:
            for way, link in (("out", process.out), ("in", process.into)):
                link.tick(now_s)
                if link.served:
                    note(f"{role}: link {way}", link.served / link.rate / now_s, link.waiting_s / now_s)
            for name, executor in process.executors.items():
                executor.tick(now_s)
                if name not in holds:
                    note(f"{role}: {name}", executor.busy_s / now_s, executor.waiting_s / now_s)
    return used, queued

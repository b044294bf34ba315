"""Numbers of processes that follow how busy these are: what ``[cluster.autoscale]`` asks for, checked against the run."""

from __future__ import annotations

from pathlib import Path

from girih.cluster.cluster import Cluster
from girih.cluster.elastic.autoscale import Autoscaler
from girih.cluster.roles import RoleName
from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.strategies.strategy import Strategy, scaled


def autoscaler_of(
    run: Path | None, processes: Cluster, strategy: Strategy, facts: Facts, *, held: bool
) -> Autoscaler | None:
    """The autoscaler of a run, on rank 0; None elsewhere, and where no number is to change by itself.

    Args:
        run: the run's directory, on rank 0.
        held: whether the user gave a plan, which says how many processes there are.

    Raises:
        ConfigError: a number is to change by itself that cannot while trainers stay.
    """
    options = processes.options
    if not options.autoscale:
        return None
    try:
        _check(processes, strategy, facts, held=held)
    except ConfigError as error:
        raise ConfigError(f"cluster: autoscale: {error}") from None
    if not processes.ranks.first:
        return None
    if run is None:
        raise ConfigError("cluster: autoscale: needs a run directory; give Trainer(run=...)")
    bounds = {str(role): each for role, each in options.autoscale.items()}
    return Autoscaler(
        run, bounds, every_s=options.autoscale_every_s, beyond_cores=options.autoscale_beyond_cores
    )


def _check(processes: Cluster, strategy: Strategy, facts: Facts, *, held: bool) -> None:
    bounds = processes.options.autoscale
    if held:
        raise ConfigError(
            "the run holds a plan that says how many processes there are; leave one of the two out"
        )
    for most in (False, True):
        scaled(strategy, {role: each[most] for role, each in bounds.items()}).plan(facts)
    if RoleName.TRAINER in bounds or not hasattr(strategy, "rescale"):
        raise ConfigError(
            "trainers begin anew where their number changes, so it never does by itself; use girih scale"
        )
    if not processes.may_grow:
        raise ConfigError(
            "each process has its place here, as under --cluster; leave it out, and use girih scale"
        )

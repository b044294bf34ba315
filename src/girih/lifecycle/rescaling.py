"""Adds and removes processes while a run trains: the trainers' side.

Requests are files in the run directory. The first trainer reads a request between two steps and stops all trainers, the
same as a signal does. Then no request is in flight. If the number of embedding servers changes, a checkpoint carries
rows to the new servers, the same as when a run ends and resumes. If the number of trainers changes, the run ends and
resumes (decision 0061).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from girih import config
from girih.checkpoint import Manifest, Storage
from girih.checkpoint.parts import PartReader
from girih.checkpoint.state import RunState
from girih.cluster.autoscale import Autoscaler
from girih.cluster.roles import RoleName
from girih.config.sections import read_toml, write_toml
from girih.errors import ConfigError, UserError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.processes.lease import Lease
from girih.runs import scale_requests
from girih.runs.directory import LOCK
from girih.runs.scale_requests import ScaleRequest, ScaleStage
from girih.strategies.strategy import Strategy
from girih.training.session import RunContext, Session, StepHook

_LOG = logging.getLogger(__name__)
LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A change of the numbers of a run's processes, the same on all trainers.

    Attributes:
        counts: role → number of processes.
        restarts_all: whether all processes restart, including trainers.
        rows_move: whether embedding servers change, so that rows are copied to new servers.
    """

    counts: Mapping[str, int]
    restarts_all: bool
    rows_move: bool

    @property
    def needs_checkpoint(self) -> bool:
        """Returns whether the run continues from a checkpoint made at this point."""
        return self.restarts_all or self.rows_move


class Rescaling(StepHook):
    """Carries out scaling requests. All trainers create it.

    Args:
        context: without a run directory, no request is read.
        held: True if the user gave a plan. A plan fixes the numbers of processes.

    Raises:
        ConfigError: the options scale a role automatically that cannot change while trainers run.
    """

    pauses = False

    def __init__(self, context: RunContext, strategy: Strategy, facts: Facts, *, held: bool) -> None:
        self._run, self._ranks, self._processes = context.directory, context.ranks, context.processes
        self._facts, self._held = facts, held
        with config.located("cluster: autoscale"):
            self.autoscaler = self._make_autoscaler(strategy)
        self._wanted: tuple[ScaleRequest, Scaling] | None = None
        self._looked_s = 0.0

    def follow(self, strategy: Strategy, plan: Plan) -> None:
        """Takes the strategy and the plan with which training starts or continues."""
        self._strategy, self._plan = strategy, plan

    def due(self, state: RunState) -> bool:
        """Checks for a request on rank 0, several times a second, until there is a request."""
        looks = self._run is not None and self._wanted is None
        return looks and time.monotonic() - self._looked_s >= LOOK_S

    def run(self, state: RunState) -> None:
        """Stops all trainers if there is a request that can be carried out.

        Otherwise reports the reason, or that the request is already done.
        """
        self._looked_s, strategy, plan = time.monotonic(), self._strategy, self._plan
        if self.autoscaler is not None:
            self.autoscaler.look(plan.roles, state.examples, state.train_s)
        if self._run is None:
            return
        try:
            request = scale_requests.pending(self._run)
        except UserError:
            scale_requests.withdraw(self._run)
            return
        if request is None:
            return
        if all(plan.roles.get(role) == count for role, count in request.counts.items()):
            self._note_scaled(self._run, request, plan, state.step)
        elif request.begun is not None:
            why = request.begun.get("failed", "a process was killed meanwhile")
            scale_requests.refuse(self._run, request, f"{why}; the run continues unchanged")
        else:
            try:
                self._wanted = request, self._checked(request, strategy, plan)
            except UserError as error:
                scale_requests.refuse(self._run, request, str(error))
                return
            self._ranks.request_pause()

    def agreed(self, *, is_finished: bool) -> Scaling | None:
        """Returns the scaling that all trainers have stopped for, if any. All trainers call it.

        Args:
            is_finished: whether this trainer has finished its last step.
        """
        if not (self._ranks.stopping and self._ranks.agree_on_pause()):
            return None
        left = self._ranks.any(not is_finished)
        wanted = None if self._wanted is None else asdict(self._wanted[1])
        agreed_counts = self._ranks.broadcast(wanted)
        if left:
            return Scaling(**agreed_counts)
        self._ranks.end_pause()
        return None

    def begin(self, scaling: Scaling, step: int) -> None:
        """Records, on rank 0, in the run and with its launcher, that a scaling is in progress."""
        if self._run is None or self._wanted is None:
            return
        request = self._wanted[0]
        keeper = Lease.of_run(self._run / LOCK) if self._processes.may_grow else None
        before = {role: self._plan.roles[role] for role in request.counts}
        scale_requests.begin(self._run, request, step, before, keeper)
        options = self._strategy.capabilities.scalable_roles
        overrides = [f"strategy.{options[role]}={count}" for role, count in scaling.counts.items()]
        stage = ScaleStage.MOVING if scaling.rows_move else ScaleStage.DONE
        stage = ScaleStage.RESTART if scaling.restarts_all else stage
        self._processes.scale(stage, scaling.counts, overrides)

    def done(self, scaling: Scaling) -> None:
        """Records, on rank 0, that all processes are running. The duration is known once training continues."""
        self._wanted = None
        if self._run is None:
            return
        self._processes.scale(ScaleStage.DONE, scaling.counts, ())
        file = self._run / "config.toml"
        if file.exists():  # --resume of a run from a config file keeps the new number
            written = read_toml(file, expanded=False)
            for role, count in scaling.counts.items():
                option = self._strategy.capabilities.scalable_roles[role]
                config.apply_override(written, f"strategy.{option}={count}")
            write_toml(file, written)

    def refuse_late(self) -> None:
        """Reports, on rank 0, that no request is carried out any more."""
        wanted, self._wanted = self._wanted, None
        if self._run is None:
            return
        request = scale_requests.pending(self._run) if wanted is None else wanted[0]
        if request is not None and request.begun is None:
            scale_requests.refuse(self._run, request, "the run has done its last step, or must stop")

    def _make_autoscaler(self, strategy: Strategy) -> Autoscaler | None:
        """Makes the autoscaler of a run, on rank 0.

        Returns None on other ranks, or if no number scales automatically.
        """
        options = self._processes.options
        if not options.autoscale:
            return None
        if self._held:
            raise ConfigError(
                "the run has a plan that fixes the numbers of processes; leave out the plan or the autoscaling"
            )
        bounds = {str(role): each for role, each in options.autoscale.items()}
        for most in (False, True):
            strategy.with_counts({role: bound[most] for role, bound in bounds.items()}).plan(self._facts)
        if RoleName.TRAINER in bounds or not strategy.capabilities.scales_in_place:
            raise ConfigError(
                "a change of the number of trainers restarts them, so it is never automatic; use girih scale"
            )
        if not self._processes.may_grow:
            raise ConfigError(
                "each process has a fixed host, for example under --cluster; leave it out, and use girih scale"
            )
        if not self._ranks.first:
            return None
        if self._run is None:
            raise ConfigError("a run directory is needed; give Trainer(run=...)")
        return Autoscaler(
            self._run, bounds, every_s=options.autoscale_every_s, beyond_cores=options.autoscale_beyond_cores
        )

    def _note_scaled(self, run: Path, request: ScaleRequest, plan: Plan, step: int) -> None:
        """Records that the requested number of processes runs, and the change of the number."""
        if request.begun is None:
            request = scale_requests.begin(
                run, request, step, {role: plan.roles[role] for role in request.counts}
            )
        done = scale_requests.end(run, request)
        changes = [f"{name} {old} → {new}" for name, (old, new) in done["roles"].items() if old != new]
        if changes:
            _LOG.warning("scaled at step %d: %s", done["step"], ", ".join(changes))

    def _checked(self, request: ScaleRequest, strategy: Strategy, plan: Plan) -> Scaling:
        """Checks a request, and returns its scaling.

        Raises:
            ConfigError: the request cannot be carried out.
        """
        changed = strategy.with_counts(request.counts)
        if self._held:
            raise ConfigError("the run has a plan that fixes the numbers of processes; train without --plan")
        trainers = request.counts.get(RoleName.TRAINER, self._ranks.size)
        in_place = strategy.capabilities.scales_in_place and self._processes.may_grow
        may_stay = in_place and trainers == self._ranks.size
        if not (may_stay or self._processes.has_launcher):
            raise ConfigError(
                "only the launcher of girih train can restart trainers, and this run has one process, or torchrun; end it,"
                " and continue with --resume and other numbers"
            )
        changed.plan(replace(self._facts, num_trainers=trainers))
        servers = RoleName.EMBEDDING_SERVER
        moves = request.counts.get(servers, plan.roles.get(servers)) != plan.roles.get(servers)
        return Scaling(counts=dict(request.counts), restarts_all=not may_stay, rows_move=moves)


def rescaled(
    scaling: Scaling,
    strategy: Strategy,
    plan: Plan,
    session: Session,
    context: RunContext,
    saved: Storage | None,
    num_updates: int,
) -> tuple[Strategy, Plan, Session]:
    """Changes the processes besides the trainers, copies rows to them, and returns the new strategy, plan and session.

    The plan predicts no speed, because the old prediction was for other numbers of processes.

    Args:
        saved: the checkpoint that was just made, if rows are copied.
        num_updates: number of updates that this trainer has made.
    """
    changed_strategy = strategy.with_counts(scaling.counts)
    count_options = strategy.capabilities.scalable_roles
    options = {count_options[role]: count for role, count in scaling.counts.items()}
    loaders = {"loaders": scaling.counts[RoleName.LOADER]} if RoleName.LOADER in scaling.counts else {}
    changed = replace(
        plan,
        options={**plan.options, **options},
        roles={**plan.roles, **scaling.counts},
        feed={**plan.feed, **loaders},
        predicted={name: value for name, value in plan.predicted.items() if name != "speed"},
    )
    session = changed_strategy.rescale(changed, context, session, plan)
    if saved is not None:
        reader = PartReader(saved, Manifest.read(saved).shards)
        session.sparse.load(replace(reader, newest=reader.newest_uses()), step=num_updates)
    return changed_strategy, changed, session

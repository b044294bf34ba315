"""``substitution``: weights never leave their trainer; partial results are aggregated (DES, Algorithm 1).

| sparse half                               | schedule | dense half             |
| ``FeatureParallelSparse``, fed by columns | in step  | ``SubstitutedReplica`` |

Equal to ``local`` on the same batches, up to the order of summation. Needs models made of substitutable operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from girih.errors import ConfigError
from girih.planner import costs, traffic
from girih.planner.facts import Facts, ModelFacts
from girih.planner.operators import ELEMENTWISE
from girih.planner.placement import Placement, balanced, modulo
from girih.planner.plan import Plan
from girih.planner.steps import in_step
from girih.planner.steps.basis import Basis
from girih.planner.steps.graph import StepGraph
from girih.strategies.strategy import (
    TRAINER,
    Capabilities,
    Processes,
    StrategyOptions,
    base_plan,
    half_options,
    in_step_session,
    predicted_exchange,
    predicted_traffic,
)

if TYPE_CHECKING:
    from girih.training.session import RunContext, Session

NORM_OPTIMIZERS = ("girih.dense.options.Lamb",)
"""Optimizers that need norms of whole parameters. The dense half computes these norms."""


class Substitution(StrategyOptions):
    """Trains on several trainers, each with the whole tables of its own features.

    Attributes:
        trainers: number of trainer processes; ``torchrun`` sets it. At most the number of tables.
        dense: the computation of the upper network: "replicated", each trainer computes the whole training batch (DES);
            "split", each computes its share of the examples; "auto", the choice that is faster at nominal speeds.
        placement: of tables: "balanced" by the accesses of the first batches; "modulo", table t on trainer t mod N (DES §5).
        wire_partials: "bfloat16" halves the bytes of partial results, and rounds them to 8 bits.

    Examples:
        Start a program with this strategy with ``torchrun --nproc-per-node 2``.

        >>> import girih
        >>> strategy = girih.Substitution(trainers=2, dense="split", wire_partials="bfloat16")
        >>> strategy.trainers, strategy.placement
        (2, 'balanced')
    """

    name: ClassVar[str] = "substitution"
    capabilities: ClassVar[Capabilities] = Capabilities(
        micro_batch_layers=("embedding", "mlp"), prefetching=True, scalable_roles={TRAINER: "trainers"}
    )
    trainers: Processes = 1
    dense: Literal["auto", "replicated", "split"] = "auto"
    placement: Literal["balanced", "modulo"] = "balanced"
    wire_partials: Literal["float32", "bfloat16"] = "float32"

    @property
    def required_facts(self) -> frozenset[str]:
        """The profile, which decides the placement of tables."""
        return frozenset({"profile"})

    def plan(self, facts: Facts) -> Plan:
        """Decides which trainer owns which features, and how the upper network is computed.

        Raises:
            ConfigError: ``compile``, a model without substitutable operators, an optimizer that needs whole parameters, or
                more trainers than tables.
        """
        _check_model(facts.model)
        if facts.compile:
            raise ConfigError(
                "strategy: substitution: the forward pass exchanges partial results, which cannot be compiled; set"
                " train.compile = false, or use strategy 'synchronous'"
            )
        placement = self._place(facts)
        split = self._splits(facts)
        return base_plan(
            self,
            facts,
            placement=dict(placement.owners),
            schedule={"name": "in_step", "upper_network": "split" if split else "replicated"},
            feed={"name": "features"},
            wire={"partials": self.wire_partials},
            seeds={"run": facts.seed, "dropout": "per_rank" if split else "alike"},
            predicted=self._predicted(facts, placement, split=split),
        )

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work of a step, in which partial results and dense gradients travel."""
        basis = Basis.of(facts, self.calibration_key)
        if basis is None:
            return None
        if facts.num_trainers == 1:
            return in_step.local(basis)
        return in_step.substitution(basis, self._partial_sizes(facts, split=self._splits(facts)))

    def build(self, plan: Plan, context: RunContext) -> Session:
        """Builds this trainer's tables and operators, and its copy of the upper network."""
        from girih.dense.halves.substituted import SubstitutedReplica
        from girih.sparse.halves.local import FeatureParallelSparse
        from girih.training.feeds import FeatureFeed

        placement = Placement(plan.placement)
        dense = SubstitutedReplica(
            context.dense,
            context.ranks,
            schema=context.sparse.schema,
            placement=placement,
            split=plan.schedule["upper_network"] == "split",
            half=plan.wire["partials"] == "bfloat16",
        )
        sparse = FeatureParallelSparse(context.sparse, context.ranks, placement, **half_options(plan))
        feed = FeatureFeed(context.ranks, placement.features_of(context.ranks.rank))
        return in_step_session(plan, sparse, dense, feed)

    def _place(self, facts: Facts) -> Placement:
        colocated = [names for operator in facts.model.operators for names in operator.colocated_features]
        if facts.profile is None or self.placement == "modulo":
            return modulo(facts.schema, facts.num_trainers, colocated)
        return balanced(facts.schema, facts.num_trainers, facts.profile.loads(), colocated)

    def _splits(self, facts: Facts) -> bool:
        """Returns whether the upper network is split. "auto" is False for one trainer, or if the data are not known yet."""
        if self.dense != "auto" or facts.num_trainers == 1 or facts.batch_size is None:
            return self.dense == "split"
        return traffic.split_pays(
            facts.batch_size,
            facts.num_trainers,
            shared_parameters=facts.model.upper_parameters,
            weights=facts.model.upper_weights,
            speeds=facts.speeds,
        )

    def _partial_sizes(self, facts: Facts, *, split: bool) -> traffic.PartialSizes:
        """Returns the sizes of the partial results."""
        operators = facts.model.operators
        return traffic.PartialSizes(
            summed=sum(op.columns for op in operators if op.aggregation == "sum"),
            concatenated=tuple(op.columns for op in operators if op.aggregation == "concat"),
            shared_parameters=facts.model.upper_parameters,
            split=split,
            partial_bytes=2 if self.wire_partials == "bfloat16" else 4,
        )

    def _predicted(self, facts: Facts, placement: Placement, *, split: bool) -> dict[str, object]:
        """Returns owners, and a trainer's bytes per step with their time, for this strategy and for ``synchronous``."""
        if facts.num_trainers == 1 or facts.batch_size is None:
            return {}
        sizes, seconds = self._partial_sizes(facts, split=split), None
        sent = traffic.substitution(facts.batch_size, facts.num_trainers, sizes)
        if facts.links is not None:
            seconds = costs.substitution_step(facts.batch_size, facts.num_trainers, facts.links, sizes)
        predicted = {
            "dense": "split" if split else "replicated",
            "owners": dict(placement.owners),
            **predicted_traffic(sent, seconds),
        }
        synchronous = predicted_exchange(facts)
        return predicted | {f"synchronous_{name}": value for name, value in synchronous.items()}


def _check_model(model: ModelFacts) -> None:
    """Refuses a model without substitutable operators, or an optimizer that needs whole tensors."""
    if model.not_substitutable is not None:
        raise ConfigError(f"strategy: substitution: {model.name}: {model.not_substitutable}")
    if not model.operators:
        raise ConfigError(
            f"strategy: substitution: {model.name} has no substitutable operator; build it from those in"
            " girih.models.operators, or use strategy 'synchronous'"
        )
    module, _, kind = model.optimizer.rpartition(".")
    known = model.optimizer in NORM_OPTIMIZERS or (kind in ELEMENTWISE and module.startswith("torch.optim"))
    if model.optimizer and not known:
        raise ConfigError(
            f"strategy: substitution: the dense optimizer {kind} may need whole parameters; expected one of"
            f" {', '.join(ELEMENTWISE)}, or girih's Lamb"
        )

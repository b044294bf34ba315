"""Facts about a model, for the planner."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from girih.dense.halves.replica import made_by
from girih.dense.options import OptimizerFactory
from girih.models.operators import operators_of
from girih.planner.costs import BUCKET_BYTES
from girih.planner.facts import ModelFacts, OperatorFacts
from girih.planner.traffic import FLOAT_BYTES
from girih.schema import Schema


def model_facts(module: nn.Module, optimizer: OptimizerFactory, schema: Schema) -> ModelFacts:
    """Parameters, substitutable operators and optimizer of a model.

    Raises:
        ConfigError: ``optimizer`` makes no optimizer.
    """
    operators = list(operators_of(module))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    spread = {  # those that go with features
        operator.get_parameter(name)
        for _, operator in operators
        for name in copy.deepcopy(operator).narrow(schema)
    }
    upper = [parameter for parameter in trained if parameter not in spread]
    made = made_by(optimizer, trained)
    kind = type(made)
    strategies = getattr(module, "loss_strategies", None)
    return ModelFacts(
        name=type(module).__name__,
        num_parameters=sum(p.numel() for p in trained),
        upper_parameters=sum(p.numel() for p in upper),
        upper_weights=sum(p.numel() for p in upper if p.dim() > 1),
        last_bucket=_last_bucket(trained),
        operators=tuple(
            OperatorFacts(
                name=name,
                aggregation=operator.aggregation,
                columns=operator.columns,
                colocated_features=operator.colocated_features,
            )
            for name, operator in operators
        ),
        not_substitutable=getattr(module, "not_substitutable", None),
        optimizer="" if made is None else f"{kind.__module__}.{kind.__name__}",
        loss_strategies=None if strategies is None else tuple(strategies),
    )


def _last_bucket(parameters: Sequence[nn.Parameter]) -> int:
    """Numbers of the last bucket that torch's DistributedDataParallel fills, from the parameters declared last to the first."""
    filled = 0
    for number, parameter in enumerate(reversed(parameters), start=1):
        filled += parameter.numel()
        if FLOAT_BYTES * filled >= BUCKET_BYTES and number < len(parameters):
            filled = 0
    return filled

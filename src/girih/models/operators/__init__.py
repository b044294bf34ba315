"""Substitutable operators: partial results and their combination, written once for every strategy (DES)."""

from __future__ import annotations

from girih.models.operators.operator import (
    Aggregated,
    Fields,
    FirstOrder,
    ParameterSplit,
    SubstitutableOperator,
    operators_of,
)
from girih.models.operators.products import SecondOrder, VectorCrosses
from girih.models.operators.projections import AttendedProjection, FieldMLP, FieldProjection

__all__ = [
    "Aggregated",
    "AttendedProjection",
    "FieldMLP",
    "FieldProjection",
    "Fields",
    "FirstOrder",
    "ParameterSplit",
    "SecondOrder",
    "SubstitutableOperator",
    "VectorCrosses",
    "operators_of",
]

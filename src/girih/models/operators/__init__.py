"""Substitutable operators: written once as partial results and how they combine, for every strategy (DES)."""

from __future__ import annotations

from girih.models.operators.attended_projection import AttendedProjection
from girih.models.operators.field_projection import FieldMLP, FieldProjection
from girih.models.operators.fields import Fields
from girih.models.operators.first_order import FirstOrder
from girih.models.operators.operator import Aggregated, ParameterSplit, SubstitutableOperator, operators_of
from girih.models.operators.second_order import SecondOrder
from girih.models.operators.vector_crosses import VectorCrosses

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

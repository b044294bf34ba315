"""Metrics of predictions: exact, and the same however the examples are split over ranks."""

from __future__ import annotations

from girih.metrics.result import DIRECTIONS, CalibrationBin, LabelMetrics, Metrics
from girih.metrics.scores import Scores

__all__ = ["DIRECTIONS", "CalibrationBin", "LabelMetrics", "Metrics", "Scores"]

"""Metrics of predictions: exact, and the same however the examples are split over ranks."""

from __future__ import annotations

from girih.metrics.result import CalibrationBin, LabelMetrics, Metrics
from girih.metrics.scores import Scores

__all__ = ["CalibrationBin", "LabelMetrics", "Metrics", "Scores"]

"""Metrics of predictions. They are exact, and they do not depend on how the examples are split over ranks."""

from __future__ import annotations

from girih.metrics.result import CalibrationBin, LabelMetrics, Metrics
from girih.metrics.scores import Scores

__all__ = ["CalibrationBin", "LabelMetrics", "Metrics", "Scores"]

"""All commands; importing this registers them."""

from __future__ import annotations

from girih.cli import evaluate, info, inspect, predict, report, train

__all__ = ["evaluate", "info", "inspect", "predict", "report", "train"]

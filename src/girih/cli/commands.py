"""All commands: importing this module registers them."""

from __future__ import annotations

from girih.cli import bench, evaluate, info, inspect, plan, predict, report, train

__all__ = ["bench", "evaluate", "info", "inspect", "plan", "predict", "report", "train"]

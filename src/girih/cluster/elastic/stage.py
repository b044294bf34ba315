"""Stages of a scaling, as the first trainer tells its launcher."""

from __future__ import annotations

from enum import StrEnum


class ScaleStage(StrEnum):
    """Stages of a scaling that the launcher is to know of."""

    MOVING = "moving"
    """Rows lie in the last checkpoint alone: trainers that come back find none in embedding servers."""
    DONE = "done"
    """All processes are there, with their rows."""
    ANEW = "anew"
    """Trainers end, with a checkpoint; all processes begin anew."""

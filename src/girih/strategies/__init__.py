"""Strategies, a page each: which tiles, which schedule, which roles."""

from __future__ import annotations

from girih.strategies.local import Local

Strategy = Local
BY_NAME: dict[str, type[Strategy]] = {Local.name: Local}

__all__ = ["BY_NAME", "Local", "Strategy"]

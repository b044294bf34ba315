"""Counts of roles, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from girih.errors import ConfigError

MOST = 1024


def check_counts(strategy: Any, names: Sequence[str], *, least: int = 1) -> None:
    """Refuses anything but integers from ``least`` to 1,024.

    Raises:
        ConfigError: names the option.
    """
    for name in names:
        value = getattr(strategy, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ConfigError(f"strategy: {name} = {value!r}: expected an integer from {least} to {MOST}")

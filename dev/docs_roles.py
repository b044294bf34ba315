"""Griffe extension: roles of docstrings, as in :class:`girih.Trainer`, become plain code on the site's pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]*)`")


class PlainRoles(griffe.Extension):
    """Rewrites each docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

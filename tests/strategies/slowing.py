"""Roles of runs that a test slows down, and speeds up again, while they are on; see slow/sitecustomize.py."""

import json
import os
from pathlib import Path


class Slowing:
    """What is slow in the processes that are started from here on."""

    def __init__(self, directory, monkeypatch):
        self.file = directory / "slow.json"
        self.roles()
        path = [str(Path(__file__).parent / "slow"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setenv("GIRIH_SLOW", str(self.file))

    def roles(self, roles=None, **how):
        """From now on these take so many seconds longer for each batch, and no others."""
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps({"roles": roles or {}, **how}))
        draft.replace(self.file)

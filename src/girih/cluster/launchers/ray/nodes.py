"""The nodes of a Ray cluster as the machines of a run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from girih.cluster.launchers.machines import Launch
from girih.cluster.launchers.ray.launcher import RayCluster, RayLauncher
from girih.cluster.segments import new_prefix_of_nodes
from girih.errors import ConfigError


class Nodes:
    """See :class:`girih.cluster.launchers.machines.Machines`.

    Raises:
        ConfigError: there is no cluster, or it has not what the run asks for.
    """

    def __init__(self, what: Launch) -> None:
        self._what = what
        self._resources = what.options.resources_of(what.counts, on_gpus=what.on_gpus)
        self._cluster = RayCluster(what.options.address)
        self._launcher: RayLauncher | None = None
        self.bind, self.segments = self._cluster.host, new_prefix_of_nodes()
        self._seen = what.run.absolute().parent / f".girih-{secrets.token_hex(8)}"

    def launcher(self, hello: Mapping[str, Any]) -> RayLauncher:
        """See :class:`girih.cluster.launchers.machines.Machines`."""
        self._seen.parent.mkdir(parents=True, exist_ok=True)
        self._seen.touch()
        self._launcher = launcher = RayLauncher(
            self._what.counts,
            self._resources,
            trainer=self._what.command,
            again=self._what.again,
            hello=hello,
            seen=str(self._seen),
            writers=1 if self._what.checkpoints_elsewhere else None,
            environment=self._what.environment,
        )
        if self._what.one_host and len(launcher.hosts) > 1:
            raise ConfigError(
                f"{self._what.one_host} is for processes of one host, and Ray placed the run on {len(launcher.hosts)}; use"
                " --set strategy.transport=tcp"
            )
        return launcher

    def close(self) -> None:
        """See :class:`girih.cluster.launchers.machines.Machines`."""
        if self._launcher is not None:
            self._launcher.close()
        self._cluster.close()
        with suppress(OSError):
            self._seen.unlink()

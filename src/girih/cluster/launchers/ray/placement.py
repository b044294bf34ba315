"""The placement group of a run: a bundle of resources for each process, all at once or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from girih.cluster.options import RoleResources
from girih.cluster.roles import RoleName
from girih.errors import ConfigError

PLACED_S = 60.0
Place = tuple[RoleName, int]
"""Role and index."""


class RayPlacement:
    """The place of each process of a run, for as long as it lasts: one that comes back does so on its node.

    Args:
        counts: role → processes.
        resources: role → those of each process.
        placed_s: the cluster has so long to make room.

    Raises:
        ConfigError: the cluster does not have them.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        resources: Mapping[RoleName, RoleResources],
        *,
        placed_s: float = PLACED_S,
    ) -> None:
        self._places: list[Place] = [
            (RoleName(name), index) for name, count in counts.items() for index in range(count)
        ]
        bundles = [resources[name].bundle() for name, _ in self._places]
        self._group = placement_group(bundles, strategy="PACK")
        try:
            found = self._group.wait(placed_s)
        except RayError:
            found = False
        if not found:
            remove_placement_group(self._group)
            raise ConfigError(_too_little(bundles, placed_s))
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self.hosts: dict[Place, str] = {
            place: addresses[nodes[number]] for number, place in enumerate(self._places)
        }

    def of(self, name: RoleName, index: int) -> PlacementGroupSchedulingStrategy:
        """The strategy that places an actor with its process."""
        return PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._places.index((name, index))
        )

    def is_there(self) -> bool:
        """Whether Ray still has the group: an actor whose group is gone waits for ever (ray#57726)."""
        return bool(placement_group_table(self._group)["state"] in ("CREATED", "RESCHEDULING"))

    def close(self) -> None:
        """Gives all back; what still runs there ends."""
        remove_placement_group(self._group)


def _too_little(bundles: Sequence[Mapping[str, float]], placed_s: float) -> str:
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            wanted[name] = wanted.get(name, 0.0) + amount
    free: Mapping[str, Any] = ray.available_resources()  # type: ignore[no-untyped-call]
    asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    there = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in wanted)
    return (
        f"the cluster has no room for the run's {len(bundles)} processes within {placed_s:.0f} s: asked {asked}; free {there}."
        " Ask for fewer processes, or for less by [cluster] resources"
    )


def _nodes() -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found

"""A plan: the decisions that girih makes from the facts before it builds anything. It is frozen and has a JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from girih import config
from girih.errors import ConfigError
from girih.files.sealed import open_file, parse, refusing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTagging:
    """The devices of a model's operators, if there are group servers (HT §3.2.1).

    Attributes:
        devices: operator → "trainer", or "server 0" and so on.
        cut: fully connected layers that are split into operators: see :func:`girih.hierarchical.graph.split_fc`.
    """

    devices: Mapping[str, str]
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions about a run.

    Attributes:
        strategy: name of the strategy. options: its options in the config.
        roles: role → number of processes.
        hosts: role, or role and index → host, if it is not this machine.
        placement: feature → the trainer that owns it, if features are spread.
        groups: embedding groups: ``name``, ``tables``, ``dim`` and ``device``.
        asked: the options ``[schedule]`` of the config. ``groups`` and ``schedule`` follow from them.
        schedule, feed: the kind of schedule and of feed, by ``name`` with options.
        wire: encodings between processes.
        tagging: devices of the model's operators. None if all run on trainers, or if it is not decided yet.
        seeds: seed of the run. ``dropout`` is "per_rank" if each trainer draws its own numbers, or "alike".
        predicted: predicted traffic of a step by kind, and the decisions that follow from it.
        measured: the measurements that the decisions depend on.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, int] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    feed: Mapping[str, Any] = field(default_factory=dict)
    wire: Mapping[str, Any] = field(default_factory=dict)
    tagging: PlannedTagging | None = None
    seeds: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        values: dict[str, Any] = {**asdict(self), "groups": [dict(group) for group in self.groups]}
        if self.tagging is not None:
            values["tagging"]["cut"] = list(self.tagging.cut)
        return values

    @classmethod
    def from_dict(cls, mapping: object, where: str = "plan") -> Plan:
        """Inverts :meth:`to_dict`.

        Raises:
            ConfigError: a key is missing, unknown or of the wrong type.
        """
        try:
            plan: Plan = config.build(cls, mapping, where)
        except ConfigError as error:
            raise ConfigError(f"{error}; girih plan prints a plan") from None
        return plan

    def hosts_of(self, role: str) -> tuple[str, ...]:
        """Returns the host of each process of a role, by index; "" for this machine."""
        count = self.roles.get(role, 1)
        return tuple(self.hosts.get(f"{role} {index}", self.hosts.get(role, "")) for index in range(count))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Reads a plan from a file with the output of ``girih plan``.

        Raises:
            MissingFileError: the file does not exist.
            ConfigError: the file is not a plan.
        """
        return cls.from_dict(read_json(path, "girih plan prints one"), str(path))

    def check_like(self, other: Plan) -> None:
        """Checks that a plan that the user edited can be built.

        Raises:
            ConfigError: a section or group has other keys than in ``other``. Or a group is not in exactly one
                interleaving group, a feature's owner is not a trainer, or hosts do not match the trainers.
        """
        for section in ("placement", "schedule", "feed", "wire", "seeds"):
            actual, expected = (sorted(getattr(plan, section)) for plan in (self, other))
            if actual != expected:
                raise ConfigError(
                    f"plan: {section} has {actual}, but expected {expected}; plan again with girih plan"
                )
            for name, value in getattr(self, section).items():
                expected_value = getattr(other, section)[name]
                if not _is_like(value, expected_value):
                    raise ConfigError(
                        f"plan: {section}.{name} = {value!r}, expected a value like {expected_value!r}; plan again"
                    )
        with refusing("plan", "plan again with girih plan", ConfigError, "groups or schedule cannot be used"):
            self._check_groups(other)
        trainers = other.roles.get("trainer", 1)
        for feature, owner in self.placement.items():
            if not 0 <= owner < trainers:
                raise ConfigError(
                    f"plan: placement: feature {feature!r} is owned by trainer {owner}, expected one of {trainers} from 0"
                )
        unknown = sorted(set(self.hosts) - {"trainer", *(f"trainer {rank}" for rank in range(trainers))})
        hosts = self.hosts_of("trainer")
        if unknown or (any(hosts) and not all(hosts)):
            reason = f"{unknown[0]!r}" if unknown else f"none for trainer {hosts.index('')}"
            raise ConfigError(
                f"plan: hosts: {reason}; expected a host for each of {trainers} trainers, as 'trainer 0', or for none"
            )

    def fits(self, other: Plan) -> bool:
        """Returns whether both plans have the same strategy, options, processes and ``[schedule]``."""
        one, another = (
            json.dumps([plan.strategy, plan.options, plan.roles, plan.asked], sort_keys=True)
            for plan in (self, other)
        )
        return one == another

    def spreads_as(self, other: Plan) -> bool:
        """Returns whether both plans run the operators on the same group servers, with the same codecs and number of
        trainers.
        """
        one, another = (
            (
                plan.tagging,
                [plan.roles.get(role) for role in ("trainer", "group-server")],
                [plan.wire.get(kind) for kind in ("activations", "dense_gradients")],
            )
            for plan in (self, other)
        )
        return one == another

    def _check_groups(self, other: Plan) -> None:
        """Checks groups and schedule. The sparse half checks if these tables can share a group."""
        dims = {table: group["dim"] for group in other.groups for table in group["tables"]}
        keys = {key for group in other.groups for key in group}
        for group in self.groups:
            config.build(list[str], group["tables"], "plan: groups: tables")
            config.build(str, group["name"], "plan: groups: name")
            if set(group) != keys:
                raise ConfigError(f"plan: groups: {sorted(group)}; expected {sorted(keys)} of each group")
            wanted = {dims.get(table, group["dim"]) for table in group["tables"]}
            if wanted - {group["dim"]}:
                raise ConfigError(
                    f"plan: groups: {group['name']!r} has dim {group['dim']}; expected {sorted(wanted)[0]}"
                )
        names = [group["name"] for group in self.groups]
        if "interleaving" not in self.schedule:
            turns = names
        else:
            turns = [
                *self.schedule["excluded"],
                *(name for each in self.schedule["interleaving"] for name in each),
            ]
        if sorted(turns) != sorted(set(names)):
            raise ConfigError(
                f"plan: schedule: {turns} are interleaved or excluded; expected each of the groups {names} once"
            )


def _is_like(value: object, expected: object) -> bool:
    """Returns whether a value of a plan has the same type as the value that girih would write.

    Negative numbers do not pass.
    """
    if value is None or expected is None:
        return True
    if type(expected) in (int, float):
        return isinstance(value, int | float) and type(value) is not bool and value >= 0
    return type(value) is type(expected) or (isinstance(value, list) and isinstance(expected, tuple))


def read_json(path: Path, hint: str) -> object:
    """Reads plain values from a JSON file.

    Args:
        hint: the command that writes the file, for errors.

    Raises:
        MissingFileError: the file does not exist.
        ConfigError: the file is not JSON.
    """
    with open_file(path, fix=hint, kind=ConfigError) as file, refusing(path, hint, ConfigError, "not JSON"):
        return parse(file.read())

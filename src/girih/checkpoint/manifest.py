"""The manifest: the index of a checkpoint, with the facts that prove that the checkpoint is complete.

The facts of a part are ``bytes``, and ``crc32`` of the header and each tensor. A part with rows also has ``group``,
``tables`` (the number of rows of each table), ``shard`` and ``num_shards``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Self, TypedDict

from girih.checkpoint.description import ModelDescription
from girih.checkpoint.state import RunState, Step
from girih.checkpoint.storage import Storage
from girih.config import build
from girih.config.bounds import Bounds
from girih.errors import CheckpointError, MissingFileError
from girih.files.sealed import check_inside, refusing, seal, unseal
from girih.version import __version__

NAME = "manifest.json"
DENSE = "dense.safetensors"
FORMAT = 3

Count = Annotated[int, Bounds(0, (1 << 53) - 1)]
Crc = Annotated[int, Bounds(0, (1 << 32) - 1)]


class PartFacts(TypedDict, total=False):
    """The facts of a part: its size and checksums. For a part with rows, also the shard that it covers."""

    bytes: int
    crc32: Mapping[str, int]
    group: str
    tables: Mapping[str, int]
    shard: int
    num_shards: int
    left: int


Parts = Mapping[str, PartFacts]
"""The facts of each part, by the part's name relative to the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PartsManifest(ModelDescription):
    """The index of the files of a checkpoint, or of a segment of a log.

    Attributes:
        step: the number of batches seen.
        parts: the facts of each part, by the part's name relative to the directory.
    """

    step: Count
    parts: Parts
    girih: str = __version__

    @property
    def shards(self) -> Parts:
        """The parts with rows."""
        return {name: facts for name, facts in self.parts.items() if name != DENSE}

    @classmethod
    def build(cls, tree: Mapping[str, object]) -> Self:
        """Builds a manifest from the values in a file.

        Raises:
            ConfigError, ValueError: a field is unknown, or a value has another type or is out of range.
        """
        manifest: Self = build(cls, tree, "")
        check_facts(manifest.parts)
        return manifest


@dataclass(frozen=True, kw_only=True)
class Manifest(PartsManifest):
    """``manifest.json`` of a checkpoint.

    Attributes:
        plan: the plan of the run, or None if there is none.
        state: everything except rows and parameters, for example counters, data position and schedule.
        random: the states of the random generators of each trainer, by rank.
        dense: the dense half's state. In ``dense``, ``state`` and ``random``, names replace the tensors, which are in
            ``dense.safetensors``.
        rows: the number of rows of each table.
        final: True if the run ended with these weights.
    """

    step: Step
    plan: Mapping[str, Any] | None
    state: Mapping[str, Any]
    random: list[Any]
    dense: Any
    rows: Mapping[str, Count]
    final: bool = False
    format: int = FORMAT

    @property
    def run(self) -> RunState:
        """The progress of the run at the save."""
        return RunState.from_dict(self.state["run"])

    @property
    def manual(self) -> bool:
        """True if ``Trainer.save`` wrote it. Its weights count as final, and no run continues in its directory."""
        return bool(self.state.get("by_hand", False))

    def write(self, checkpoint: Storage) -> None:
        """Writes the manifest's file. The old file stays until the new file is complete."""
        checkpoint.replace(NAME, seal(asdict(self), infinite=True))

    def marked(self, checkpoint: Storage, *, final: bool) -> None:
        """Writes the manifest again with another ``final``, if its value differs."""
        if self.final != final:
            replace(self, final=final).write(checkpoint)

    @classmethod
    def read(cls, checkpoint: Storage) -> Manifest:
        """Reads the manifest. Checks that all parts have their full size, and cover all shards of all tables.

        Raises:
            CheckpointError: the place is not a checkpoint, has another format, or is damaged. The message names the
                part.
        """
        manifest = cls._parse(checkpoint)
        check_parts(manifest.parts, checkpoint)
        check_coverage(manifest.shards, checkpoint.url)
        return manifest

    @classmethod
    def _parse(cls, checkpoint: Storage) -> Manifest:
        where, fix = f"{checkpoint}/{NAME}", f"delete {checkpoint.name} to use an older one"
        try:
            text = checkpoint.read(NAME)
        except MissingFileError:
            raise CheckpointError(f"{checkpoint}: no {NAME}, so this is not a complete checkpoint") from None
        content = unseal(text, where, FORMAT, fix, infinite=True, older=(2,))
        with refusing(where, fix):
            manifest = cls.build(_upgraded(content) if content["format"] == 2 else content)
            if manifest.run.step != manifest.step:
                raise ValueError(f"step = {manifest.step}, but state.run.step = {manifest.run.step}")
            if manifest.rows != rows_of(manifest.shards):
                raise ValueError("rows of tables are not those of its parts")
            if checkpoint.name.startswith("step-") and checkpoint.name != name_of(manifest.step):
                raise ValueError(f"it is of step {manifest.step}, which belongs in {name_of(manifest.step)}")
            build(bool, manifest.state.get("by_hand", False), "state.by_hand")
        return manifest


def _upgraded(tree: Mapping[str, object]) -> dict[str, object]:
    """Converts a manifest of format 2, whose ``state`` has the recipe and the normalization, to format 3."""
    state = build(dict[str, Any], tree["state"], "state")
    moved = {"recipe": state.pop("recipe", {}), "normalization": state.pop("normalization", None)}
    return {**tree, **moved, "needs": {}, "state": state, "format": FORMAT}


@dataclass(frozen=True, slots=True, kw_only=True)
class _DenseFacts:
    bytes: Count
    crc32: Mapping[str, Crc]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowFacts(_DenseFacts):
    group: str
    tables: Mapping[str, Count]
    shard: Count
    num_shards: Annotated[int, Bounds(1, (1 << 31) - 1)]
    left: Count = 0


def check_facts(parts: Parts) -> None:
    """Checks the facts of all parts of a checkpoint, or of a segment of a log.

    Raises:
        ValueError: there is no dense part, a name leads out of the directory, or a fact is missing, unknown or out of
            range.
    """
    if DENSE not in parts:
        raise ValueError(f"it lists no {DENSE}")
    for name, facts in parts.items():
        check_inside(name)
        checked = build(_DenseFacts if name == DENSE else _RowFacts, facts, f"part {name!r}")
        if name != DENSE and checked.shard >= checked.num_shards:
            raise ValueError(f"part {name!r}: shard {checked.shard} of {checked.num_shards}")


def name_of(step: int) -> str:
    """Returns the name of a step, for example ``step-00012000``."""
    return f"step-{step:08d}"


def check_parts(parts: Parts, checkpoint: Storage) -> None:
    """Refuses a checkpoint with a part that is missing or has another size.

    Raises:
        CheckpointError: a part is missing or has another size. The message names the part.
    """
    sizes = checkpoint.sizes()
    for name, facts in parts.items():
        if (actual := sizes.get(name)) != facts["bytes"]:
            fault = "missing" if actual is None else f"damaged: {actual} bytes instead of {facts['bytes']}"
            raise CheckpointError(
                f"{checkpoint}/{name}: {fault}; delete {checkpoint.name} to use an older checkpoint"
            )


def part_name(group: str, number: int) -> str:
    """Returns the name of a part: ``tables/<group>/shard-0000.safetensors``."""
    return f"tables/{group}/shard-{number:04d}.safetensors"


def rows_of(parts: Parts) -> dict[str, int]:
    """Returns the number of rows of each table, over all shards."""
    rows: defaultdict[str, int] = defaultdict(int)
    for facts in parts.values():
        for table, count in facts.get("tables", {}).items():
            rows[table] += count
    return dict(rows)


def check_coverage(parts: Parts, where: str) -> None:
    """Refuses parts that lack a shard of a table, or that have a shard twice.

    Args:
        where: the checkpoint's name in errors.

    Raises:
        CheckpointError: a shard is missing or occurs twice. The message names the part, or the table and shard.
    """
    holders: defaultdict[str, dict[int, str]] = defaultdict(dict)  # table → shard → part
    for name, facts in parts.items():
        for table in facts.get("tables", {}):
            held, shard = holders[table], facts["shard"]
            first = parts[next(iter(held.values()), name)]
            if (first["group"], first["num_shards"]) != (facts["group"], facts["num_shards"]):
                raise CheckpointError(
                    f"{where}/{name}: table {table!r} of group {facts['group']!r} in {facts['num_shards']} shards;"
                    f" other parts say {first['group']!r} in {first['num_shards']}; use another checkpoint"
                )
            if shard in held:
                raise CheckpointError(
                    f"{where}/{name}: shard {shard} of table {table!r} is in {held[shard]} too; use another checkpoint"
                )
            held[shard] = name
    for table, held in holders.items():
        facts = parts[next(iter(held.values()))]
        group, num_shards = facts["group"], facts["num_shards"]
        for shard in range(num_shards):
            if shard not in held:
                raise CheckpointError(
                    f"{where}/{part_name(group, shard)}: missing: no part holds shard {shard} of {num_shards} of"
                    f" table {table!r}; use another checkpoint"
                )


def parts_for(parts: Parts, tables: Sequence[str], shard: int, num_shards: int) -> list[str]:
    """Returns the names of the parts from which a shard of some tables is restored, in order.

    These are usually the parts of all shards of the tables. But if the same tables, in the same order, had the same
    number of shards, only the part of this shard is needed. A key's shard depends on its table's number in the group.
    """
    names = [name for name in sorted(parts) if not parts[name].get("tables", {}).keys().isdisjoint(tables)]
    if all(
        parts[name]["num_shards"] == num_shards and list(parts[name]["tables"]) == list(tables)
        for name in names
    ):
        return [name for name in names if parts[name]["shard"] == shard]
    return names

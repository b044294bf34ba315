"""The index of a checkpoint: what was saved, when, and how to tell that it is whole.

The facts of a part are ``bytes`` and ``crc32``, of the header and each tensor; of a part with rows also ``group``,
``tables`` (rows of each), ``shard`` and ``num_shards``.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from girih.checkpoint.storage import Storage
from girih.config import build, checks
from girih.errors import CheckpointError, MissingFileError
from girih.runs.state import RunState
from girih.version import __version__

NAME = "manifest.json"
DENSE = "dense.safetensors"
CHECKSUM = "crc32"
FORMAT = 2

_MOST_STEPS = (1 << 31) - 1

Parts = Mapping[str, Mapping[str, Any]]
"""Name relative to the checkpoint → facts."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``manifest.json``.

    Attributes:
        step: batches seen.
        schema: as ``Schema.to_dict`` gives it; fingerprint: of that schema.
        plan: what the run was built from; None where there is none.
        state: counters, data position, schedule and the like: everything that is neither row nor parameter.
        random: the state of random generators of each trainer, by rank.
        dense: the dense half's state. In it, in ``state`` and in ``random`` names stand for tensors, which lie in
            ``dense.safetensors``.
        rows: rows of each table.
        parts: name relative to the checkpoint → bytes, checksums and, with rows, the shards that it covers.
        final: whether its weights are those with which the run ended.
    """

    step: int
    schema: Mapping[str, Any]
    fingerprint: str
    plan: Mapping[str, Any] | None
    state: Mapping[str, Any]
    random: Any
    dense: Any
    rows: Mapping[str, int]
    parts: Parts
    final: bool = False
    format: int = FORMAT
    girih: str = __version__

    @property
    def shards(self) -> Parts:
        """The parts that hold rows."""
        return {name: facts for name, facts in self.parts.items() if name != DENSE}

    @property
    def run(self) -> RunState:
        """Progress of the run when it was saved."""
        return RunState.from_dict(self.state["run"])

    @property
    def by_hand(self) -> bool:
        """Whether ``Trainer.save`` wrote it: no run goes on where it lies, and its weights are those that are wanted."""
        return bool(self.state.get("by_hand", False))

    def write(self, checkpoint: Storage) -> None:
        """Writes it whole, or leaves the one before; a checksum of all else in it comes first."""
        text = json.dumps(asdict(self))
        checksum = json.dumps({CHECKSUM: zlib.crc32(text.encode())})
        checkpoint.replace(NAME, f"{checksum[:-1]}, {text[1:]}".encode())

    def marked(self, checkpoint: Storage, *, final: bool) -> None:
        """Writes it anew where it says otherwise of ``final``."""
        if self.final != final:
            replace(self, final=final).write(checkpoint)

    @classmethod
    def read(cls, checkpoint: Storage) -> Manifest:
        """Reads it and checks that every part is there in its full size, and all shards of all tables with them.

        Raises:
            CheckpointError: not a checkpoint, of another format, or damaged; names the part.
        """
        manifest = cls._parse(checkpoint)
        check_parts(manifest.parts, checkpoint)
        check_coverage(manifest.shards, checkpoint.url)
        return manifest

    @classmethod
    def _parse(cls, checkpoint: Storage) -> Manifest:
        file = f"{checkpoint}/{NAME}"
        try:
            text = checkpoint.read(NAME)
        except MissingFileError:
            raise CheckpointError(f"{checkpoint}: no {NAME}, so this is not a complete checkpoint") from None
        try:
            content = json.loads(text)
            checksum = content.pop(CHECKSUM)
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{file}: format {content['format']}, which girih {content['girih']} wrote and reads;"
                    f" this girih reads format {FORMAT}: go on with that one, or train anew"
                )
            if zlib.crc32(json.dumps(content).encode()) != checksum:
                raise ValueError("its checksum differs")
            manifest = cls(**content)
            manifest._check()
            if checkpoint.name.startswith("step-") and checkpoint.name != name_of(manifest.step):
                raise ValueError(f"it is of step {manifest.step}, which lies in {name_of(manifest.step)}")
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            told = f"damaged ({type(error).__name__}: {error})"
            raise CheckpointError(f"{file}: {told}; delete {checkpoint.name} to use an older one") from None
        return manifest

    def _check(self) -> None:
        """Believes no name that leads elsewhere, and no count that is none."""
        checks.integer("step", self.step, 0, _MOST_STEPS)
        checks.flag("final", self.final)
        if self.run.step != self.step:
            raise ValueError(f"step = {self.step}, but state.run.step = {self.run.step}")
        for what, kind, found in (
            ("plan", dict[str, Any] | None, self.plan),
            ("schema", dict[str, Any], self.schema),
            ("random", list[Any], self.random),
        ):
            build(kind, found, what)
        for name, facts in self.parts.items():
            if name.startswith("~") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"part {name!r} does not lie in it")
            checks.integer(f"bytes of {name}", facts["bytes"], 0)
            for crc in facts["crc32"].values():
                checks.integer(f"crc32 of {name}", crc, 0)
            if name != DENSE:
                for count in facts["tables"].values():
                    checks.integer(f"rows of {name}", count, 0)
                checks.integer(f"shards of {name}", facts["num_shards"])
                checks.integer(f"shard of {name}", facts["shard"], 0, facts["num_shards"] - 1)
                if not isinstance(facts["group"], str):
                    raise ValueError(f"group of {name}")
        if DENSE not in self.parts:
            raise ValueError(f"it lists no {DENSE}")
        if self.rows != rows_of(self.shards):
            raise ValueError("rows of tables are not those of its parts")


def name_of(step: int) -> str:
    """``step-00012000``."""
    return f"step-{step:08d}"


def check_parts(parts: Parts, checkpoint: Storage) -> None:
    """Refuses a checkpoint in which a part is missing or of another size.

    Raises:
        CheckpointError: names the part.
    """
    sizes = checkpoint.sizes()
    for name, facts in parts.items():
        if (actual := sizes.get(name)) != facts["bytes"]:
            what = "missing" if actual is None else f"damaged: {actual} bytes instead of {facts['bytes']}"
            raise CheckpointError(
                f"{checkpoint}/{name}: {what}; delete {checkpoint.name} to use an older checkpoint"
            )


def part_name(group: str, number: int) -> str:
    """``tables/<group>/shard-0000.safetensors``."""
    return f"tables/{group}/shard-{number:04d}.safetensors"


def rows_of(parts: Parts) -> dict[str, int]:
    """Rows of each table, all shards together."""
    rows: defaultdict[str, int] = defaultdict(int)
    for facts in parts.values():
        for table, count in facts.get("tables", {}).items():
            rows[table] += count
    return dict(rows)


def check_coverage(parts: Parts, where: str) -> None:
    """Refuses parts that lack a shard of a table, or hold one twice.

    Args:
        where: the checkpoint, for errors.

    Raises:
        CheckpointError: names the part, or the table and shard.
    """
    holders: defaultdict[str, dict[int, str]] = defaultdict(dict)  # of each table, by shard: the part
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
        group, num_shards = (parts[next(iter(held.values()))][what] for what in ("group", "num_shards"))
        for shard in range(num_shards):
            if shard not in held:
                raise CheckpointError(
                    f"{where}/{part_name(group, shard)}: missing: no part holds shard {shard} of {num_shards} of"
                    f" table {table!r}; use another checkpoint"
                )


def parts_for(parts: Parts, tables: Sequence[str], shard: int, num_shards: int) -> list[str]:
    """The names of those that a shard of some tables is restored from, in order.

    All shards of the tables; its own alone, where the same tables, in the same order, were in as many shards as
    now: a key's shard depends on its table's number in the group.
    """
    found = [name for name in sorted(parts) if not parts[name].get("tables", {}).keys().isdisjoint(tables)]
    if all(
        parts[name]["num_shards"] == num_shards and list(parts[name]["tables"]) == list(tables)
        for name in found
    ):
        return [name for name in found if parts[name]["shard"] == shard]
    return found

"""The index of a checkpoint: what was saved, when, and how to tell that it is whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from girih.checkpoint.coverage import Parts, check_coverage, rows_of
from girih.checkpoint.storage import Storage
from girih.errors import CheckpointError, MissingFileError

NAME = "manifest.json"
DENSE = "dense.safetensors"
CHECKSUM = "crc32"
FORMAT = 2


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
    format: int = FORMAT
    girih: str = version("girih")

    @property
    def shards(self) -> Parts:
        """The parts that hold rows."""
        return {name: facts for name, facts in self.parts.items() if name != DENSE}

    def write(self, checkpoint: Storage) -> None:
        """Writes it whole, or leaves the one before; a checksum of all else in it comes first."""
        text = json.dumps(asdict(self))
        checksum = json.dumps({CHECKSUM: zlib.crc32(text.encode())})
        checkpoint.replace(NAME, f"{checksum[:-1]}, {text[1:]}".encode())

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
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            told = f"damaged ({type(error).__name__}: {error})"
            raise CheckpointError(f"{file}: {told}; delete {checkpoint.name} to use an older one") from None
        return manifest

    def _check(self) -> None:
        """Believes no name that leads elsewhere, and no count that is none."""
        _count("step", self.step)
        for name, facts in self.parts.items():
            if (
                not name
                or name.startswith(("/", "~"))
                or "\\" in name
                or {"", ".", ".."} & set(name.split("/"))
            ):
                raise ValueError(f"part {name!r} does not lie in it")
            _count(f"bytes of {name}", facts["bytes"])
            for crc in facts["crc32"].values():
                _count(f"crc32 of {name}", crc)
            if name != DENSE:
                for count in facts["tables"].values():
                    _count(f"rows of {name}", count)
                _count(f"shards of {name}", facts["num_shards"], least=1)
                _count(f"shard of {name}", facts["shard"], above=facts["num_shards"])
                if not isinstance(facts["group"], str):
                    raise ValueError(f"group of {name}")
        if DENSE not in self.parts:
            raise ValueError(f"it lists no {DENSE}")
        if self.rows != rows_of(self.shards):
            raise ValueError("rows of tables are not those of its parts")


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


def _count(what: str, value: Any, *, least: int = 0, above: int | None = None) -> None:
    if type(value) is not int or value < least or (above is not None and value >= above):
        raise ValueError(f"{what} = {value!r}")

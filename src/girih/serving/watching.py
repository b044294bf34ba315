"""A worker's end of following: it looks at the one small file that a follower replaces, and answers by what that names from then on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from girih import models
from girih.checkpoint.recipe import train_options
from girih.checkpoint.save import tensors_in
from girih.data import NormalizationStats
from girih.errors import CheckpointError, ConfigError, MissingFileError
from girih.files.sealed import reason_of, refusing
from girih.kernels.cpu import ahead
from girih.models.needs import check_same_needs
from girih.models.zoo import from_recipe
from girih.schema import Schema
from girih.serving.followed import CURRENT, Followed
from girih.serving.served import ModelVersion, Served, ServedModel, filled
from girih.serving.signature import Dense, Signature, inputs_of, outputs_of
from girih.store.mapped import MappedFile, Stack
from girih.telemetry.stats import Stats
from girih.training.specs import dense_spec

_LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 0.05
_TRIES = 20


class Watched:
    """Versions that a follower has, opened one after the other; files that several of them have are mapped once.

    Args:
        directory: of a follower that has a version. model: the user's class, as ``file.py:Class``, if it is not girih's.

    Attributes:
        served: the version that was opened last. followed: the same as its files.

    Raises:
        ConfigError: there is no version yet, or the model is of a user's class that is not named. CheckpointError: damaged.
    """

    def __init__(self, directory: Path, model: str | None = None) -> None:
        self._directory, self._files, self._class = directory, dict[str, MappedFile](), model
        ahead.make_ready(ahead.serving())
        self._seen = self._mark()
        self.followed, self.served = self._patiently(self._opened)

    def model(self, name: str) -> ServedModel:
        """The model, by the name that clients have for it."""
        followed, schema = self.followed, self.served.schema
        signature = Signature(
            name=name,
            step=followed.step,
            final=False,
            inputs=inputs_of(schema),
            outputs=outputs_of(schema),
            schema=followed.schema,
            fingerprint=followed.fingerprint,
            needs={feature: tuple(kinds) for feature, kinds in followed.needs.items()},
            recipe=followed.recipe,
            normalization=followed.normalization,
            rows=(),
            dense=Dense(parameters=followed.dense, program=None, onnx=None, inputs=()),
            source={"log": followed.log},
            files={},
        )
        return ServedModel(name, signature, self.served)

    def look(self) -> bool:
        """Opens what is there now, where it is something else than before; returns whether it is.

        Raises:
            CheckpointError: damaged, or of another model. MissingFileError: it is gone already; look again.
        """
        mark = self._mark()
        if mark == self._seen:
            return False
        try:
            self.followed, self.served = self._patiently(self._next)
        except CheckpointError:
            self._seen = mark  # it stays as it is
            raise
        self._seen = mark
        return True

    def _patiently(self, take: Callable[[Followed], Served]) -> tuple[Followed, Served]:
        """Takes what is current; once more where its files are gone by the time they are opened."""
        for _ in range(_TRIES):
            followed = Followed.read(self._directory)
            if followed is None:
                raise ConfigError(f"{self._directory}: has no version yet")
            try:
                return followed, take(followed)
            except MissingFileError as error:
                gone = error
        raise gone

    def _opened(self, followed: Followed) -> Served:
        """The first version, of which all is made."""
        described = followed.recipe["model"]
        if described is None and self._class is None:
            raise ConfigError(
                f"{followed.log}: its model is of a class of yours; give --model file.py:Class, or export the run and serve that"
            )
        with self._refusing():
            schema = Schema.from_dict(followed.schema, followed.log)
            options = replace(train_options(followed.recipe["train"]), device="cpu")
            parameters = self._parameters(followed)
            module = None if self._class else from_recipe(described, schema, parameters, followed.log)
        if module is None:
            with torch.random.fork_rng(devices=[]):
                module = models.create(str(self._class), schema, followed.recipe.get("options"), "--model")
        with self._refusing():
            if self._class is None:
                check_same_needs(module, followed.needs, schema)
            # parameters stay such as have gradients: see :func:`girih.serving.served.open_served`
            filled(module, parameters, followed.log)
            spec = dense_spec(module, schema, options, torch.optim.SGD, Stats())
            groups = followed.groups()
            stacks = [
                Stack(group.spec, files) for group, files in zip(groups, self._mapped(followed), strict=True)
            ]
            return Served(groups, stacks, spec, _normalization(followed, schema), schema, _version(followed))

    def _next(self, followed: Followed) -> Served:
        model, before = ((each.fingerprint, each.recipe, each.needs) for each in (followed, self.followed))
        if model != before:
            return self._opened(followed)
        with self._refusing():
            files = self._mapped(followed)
            if followed.dense == self.followed.dense:
                return self.served.with_files(files, _version(followed))
            parameters = self._parameters(followed)
            return self.served.with_files(
                files, _version(followed), parameters, _normalization(followed, self.served.schema)
            )

    def _refusing(self) -> contextlib.AbstractContextManager[None]:
        return refusing(self._directory / CURRENT, "wait for another version")

    def _mapped(self, followed: Followed) -> list[list[MappedFile]]:
        names = [[file.name for file in files] for files in followed.rows]
        found = {
            name: self._files.get(name) or MappedFile(self._directory / name)
            for each in names
            for name in each
        }
        self._files = found
        return [[found[name] for name in each] for each in names]

    def _parameters(self, followed: Followed) -> dict[str, Tensor]:
        return tensors_in(followed.parameters(self._directory), str(self._directory / followed.dense))

    def _mark(self) -> tuple[int, int] | None:
        """Says whether the small file is another one: it is replaced, never written to."""
        try:
            found = os.stat(self._directory / CURRENT)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


@contextlib.contextmanager
def watching(watched: Watched, put: Callable[[Served], None]) -> Iterator[None]:
    """Has a thread look for versions; each goes to ``put``. It has ended when this does: the directory may go then."""

    def work() -> None:
        told = ""
        while not ending.wait(LOOK_EVERY_S):
            try:
                if watched.look():
                    put(watched.served)
                told = ""
            except Exception as error:  # this thread goes on
                if reason_of(error) != told:
                    told = reason_of(error)
                    _LOG.warning("stays at version %s: %s", watched.served.version, told)

    ending = threading.Event()
    thread = threading.Thread(target=work, name="girih-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _version(followed: Followed) -> ModelVersion:
    return ModelVersion(followed.step, followed.number)


def _normalization(followed: Followed, schema: Schema) -> NormalizationStats:
    if followed.normalization is None:
        return NormalizationStats.empty(schema)
    return NormalizationStats.from_dict(followed.normalization, schema)

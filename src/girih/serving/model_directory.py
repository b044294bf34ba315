"""A directory with a model for servers. An export never changes. A follower's directory gets new versions.

A small file names all other files. A server polls the small file, and then answers with the files that it names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from girih import models
from girih.checkpoint.save import tensors_in
from girih.data import NormalizationStats
from girih.errors import CheckpointError, ConfigError, MissingFileError
from girih.files.sealed import reason_of, refusing
from girih.kernels.cpu import ahead
from girih.models.needs import check_same_needs
from girih.models.zoo import from_recipe
from girih.schema import Schema
from girih.serving.dense_graph import net_of
from girih.serving.served import ModelVersion, Served, filled
from girih.serving.signature import AGAIN, NAME, Signature, inputs_of, outputs_of, read_file
from girih.sparse.groups.leaves import example_for
from girih.sparse.groups.pack import Group, served_groups
from girih.store.mapped import MappedFile, Stack
from girih.telemetry.stats import Stats
from girih.training.specs import dense_spec

_LOG = logging.getLogger(__name__)
LOOK_EVERY_S = 0.05


class ModelDirectory:
    """Versions of a model in a directory, opened one after the other. Files of several versions are mapped once.

    Args:
        model: the user's class, as ``file.py:Class``; None uses girih's class, or the operators in the directory.
        verify: if True, compares the checksums of all files, which reads all of them. If False, compares only those of
            the dense half.

    Attributes:
        signature: the signature of the last opened version.
        served: the last opened version.

    Raises:
        MissingFileError: there is no model, or one of its files is missing.
        CheckpointError: a file is damaged, or of another format.
        ConfigError: the model's class is the user's, and is not given.
    """

    def __init__(self, directory: Path, model: str | None = None, *, verify: bool = True) -> None:
        self._directory, self._class, self._verify = directory, model, verify
        self._files: dict[str, MappedFile] = {}
        ahead.make_ready(ahead.serving())
        self._take(self._opened)

    def look(self) -> bool:
        """Opens the version in the directory if it is new. Returns whether it was new.

        Raises:
            CheckpointError: the version is damaged, or of another model.
            MissingFileError: a newer version has replaced it. Look again.
        """
        if self._mark() == self._seen:
            return False
        self._take(self._next)
        return True

    def _take(self, take: Callable[[Signature], Served]) -> None:
        """Opens the current version. Starts again if a newer version replaces it meanwhile."""
        while True:
            mark = self._mark()
            try:
                signature = Signature.read(self._directory)
                self.served, self.signature, self._seen = take(signature), signature, mark
                return
            except CheckpointError:
                self._seen = mark  # do not try the same damaged version again
                raise
            except MissingFileError:
                if self._mark() == mark:
                    raise

    def _opened(self, signature: Signature) -> Served:
        """Opens a version from scratch."""
        with self._refusing():
            schema, needs, options, normalization = signature.checked(str(self._directory))
            if (signature.inputs, signature.outputs) != (inputs_of(schema), outputs_of(schema)):
                raise ValueError("its inputs or outputs are not those of its schema")
            groups, parameters = served_groups(schema, needs, options.seed), self._parameters(signature)
            if self._verify and signature.dense.onnx is not None:
                read_file(self._directory, signature.dense.onnx)
        module = self._module(signature, schema, groups, parameters)
        with self._refusing():
            if self._class is None and signature.recipe["model"] is not None:
                check_same_needs(module, needs, schema)
            # keep requires_grad: without it torch multiplies differently, and last bits of predictions change
            spec = dense_spec(module, schema, replace(options, device="cpu"), torch.optim.SGD, Stats())
            files = zip(groups, self._mapped(signature), strict=True)
            stacks = [Stack(group.spec, mapped) for group, mapped in files]
            empty = NormalizationStats.empty(schema)
            return Served(groups, stacks, spec, normalization or empty, schema, _version(signature))

    def _module(
        self, signature: Signature, schema: Schema, groups: Sequence[Group], parameters: dict[str, Tensor]
    ) -> nn.Module:
        """Returns the net with its parameters: from the user's class, the recipe, or the exported operators."""
        described, program = signature.recipe["model"], signature.dense.program
        place = signature.source.get("log", self._directory)
        if self._class is not None:
            with torch.random.fork_rng(devices=[]):
                module = models.create(self._class, schema, signature.recipe.get("options"), "--model")
        elif described is not None:
            module = from_recipe(described, schema, parameters, place)
        elif program is not None:
            example = example_for(schema, groups, train=False)
            content, where = read_file(self._directory, program), self._directory / program.name
            return net_of(content, parameters, example, len(schema.labels.names), where)
        else:
            raise ConfigError(
                f"{place}: the model's class is your own; give --model file.py:Class, or export the run and serve that"
            )
        return filled(module, parameters, self._directory)

    def _next(self, signature: Signature) -> Served:
        model, before = ((each.fingerprint, each.recipe, each.needs) for each in (signature, self.signature))
        if model != before:
            return self._opened(signature)
        with self._refusing():
            files, version = self._mapped(signature), _version(signature)
            if signature.dense == self.signature.dense:
                return self.served.with_files(files, version)
            normalization = signature.checked(str(self._directory)).normalization
            return self.served.with_files(files, version, self._parameters(signature), normalization)

    def _refusing(self) -> contextlib.AbstractContextManager[None]:
        return refusing(self._directory / NAME, AGAIN)

    def _mapped(self, signature: Signature) -> list[list[MappedFile]]:
        mapped: dict[str, MappedFile] = {}
        for file in (file for files in signature.rows for file in files):
            facts = file.facts if self._verify else None
            mapped[file.name] = self._files.get(file.name) or MappedFile(self._directory / file.name, facts)
        self._files = mapped
        return [[mapped[file.name] for file in files] for files in signature.rows]

    def _parameters(self, signature: Signature) -> dict[str, Tensor]:
        file = signature.dense.parameters
        return tensors_in(read_file(self._directory, file), str(self._directory / file.name))

    def _mark(self) -> tuple[int, int] | None:
        """Returns the identity of the small file. A new version replaces the file, and nobody writes into it."""
        try:
            found = os.stat(self._directory / NAME)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def open_served(directory: Path) -> tuple[Signature, Served]:
    """Opens the model in an exported directory; see :class:`ModelDirectory`."""
    opened = ModelDirectory(directory)
    return opened.signature, opened.served


@contextlib.contextmanager
def watching(directory: ModelDirectory, put: Callable[[Served], None]) -> Iterator[None]:
    """Polls for versions in a thread, and passes each to ``put``. On exit the thread has ended."""

    def work() -> None:
        told = ""
        while not ending.wait(LOOK_EVERY_S):
            try:
                if directory.look():
                    put(directory.served)
                told = ""
            except Exception as error:  # this thread must go on
                if reason_of(error) != told:
                    told = reason_of(error)
                    _LOG.warning("stays at version %s: %s", directory.served.version, told)

    ending = threading.Event()
    thread = threading.Thread(target=work, name="girih-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _version(signature: Signature) -> ModelVersion:
    return ModelVersion(signature.step, signature.number)

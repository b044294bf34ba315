"""Models by name: girih's models, and the user's own models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from girih import models
from girih.config import check_call, plain
from girih.config.user_code import blame, load_object
from girih.errors import CheckpointError, ConfigError, nearest
from girih.models.model import Model
from girih.schema import Schema

BY_NAME: dict[str, type[nn.Module]] = {
    name: getattr(models, place.partition(".")[2]) for name, place in models.CLASSES.items()
}
"""The name of a model in configs → its class."""
_OPTIONS = "_girih_options"
"""The attribute with the options from which :func:`create` made a model of a user's class."""


def create(
    name: str,
    schema: Schema,
    options: Mapping[str, object] | None = None,
    where: str = "[model]",
    *,
    directory: Path | None = None,
) -> nn.Module:
    """Builds a model by name.

    Args:
        name: a key of ``girih.models.BY_NAME``, or ``path/to/file.py:Class`` or ``package.module:Class``.
        schema: the features and labels of the data.
        options: the constructor's keywords, as in TOML. A user's constructor gets the schema as its first argument if
            the argument is named ``schema`` or annotated ``Schema``.
        where: names the options in errors, such as ``config.toml: [model]``.
        directory: the start of the relative path of a user's file; the working directory by default.

    Raises:
        ConfigError: an unknown name or option, an option of the wrong type or out of range, or a user's module that
            cannot be loaded or built.

    Examples:
        >>> import girih
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> model = girih.models.create("deepfm", schema, {"hidden": [64, 32]})
        >>> isinstance(model, girih.models.DeepFM)
        True
    """
    is_user_model = isinstance(name, str) and ":" in name
    if is_user_model:
        expected = "a class derived from torch.nn.Module"
        cls: type[nn.Module] = load_object(
            name, f"{where}.name", directory, accepts=_is_model, expected=expected
        )
    elif isinstance(name, str) and name in BY_NAME:
        cls = BY_NAME[name]
    else:
        hint = nearest(str(name), BY_NAME)
        raise ConfigError(
            f"{where}.name = {name!r}: unknown model{hint}; for your own model, write path/to/file.py:Class"
        )
    if not isinstance(options or {}, Mapping):
        raise ConfigError(f"{where}: options = {options!r}: expected a table of options")
    first = [schema] if _takes_schema(cls) else []
    checked = check_call(cls, options or {}, f"{where} {name}", skip=len(first))
    try:
        model = cls(*first, **checked)
        if is_user_model:
            vars(model)[_OPTIONS] = dict(options or {})
        return model
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:
        if is_user_model:
            reason = f"could not be built: {blame(error, inspect.getsourcefile(cls))}"
        elif isinstance(error, MemoryError) or "allocate" in str(error) or "Overflow" in str(error):
            reason = "with these options is larger than memory; lower its widths"
        else:
            raise
        raise ConfigError(f"{where}: {name} {reason}") from error


def from_recipe(described: Any, schema: Schema, tensors: Mapping[str, Tensor], where: object) -> nn.Module:
    """Builds a girih model that a file describes, with arbitrary initial values.

    A file names no code. Its tensors are compared with the model's tensors before memory is allocated.

    Args:
        described: see :func:`description_of`. tensors: parameters and buffers by name. where: names the file in errors.

    Raises:
        CheckpointError: an unknown model or option, or a model of other tensors.
    """
    try:
        name, options = described["name"], described["options"]
        if name not in BY_NAME:
            raise ConfigError(
                f"model {name!r}: a file can only name a model of girih{nearest(str(name), BY_NAME)}"
            )
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"), _Bounded(1000 + 100 * len(tensors)):
                expected = {
                    key: each.shape for key, each in create(name, schema, options).state_dict().items()
                }
            if expected != {key: each.shape for key, each in tensors.items()}:
                raise ConfigError(f"model {name!r}: its options describe other tensors than the file holds")
            return create(name, schema, options)
    except Exception as error:  # any exception: a constructor has not checked these options
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{where}: its recipe is damaged: {reason}") from None


class _Bounded(TorchFunctionMode):
    """Refuses to build a model with many more parts than the file has tensors."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self._left -= 1
        if self._left < 0:
            raise ConfigError("its options describe more tensors than the file holds")
        # for meta tensors, torch would import packages for a second
        if function in (Tensor.normal_, Tensor.mul):
            return args[0]
        return (torch.empty if function is torch.randn else function)(*args, **kwargs or {})


def description_of(model: nn.Module) -> dict[str, object] | None:
    """Returns ``{"name", "options"}`` from which :func:`create` makes the same model; None for a user's class."""
    name = next((name for name, cls in BY_NAME.items() if cls is type(model)), None)
    if name is None or not isinstance(model, Model):
        return None
    arguments, options = model.made_with
    bound = inspect.signature(type(model).__init__).bind(model, *arguments, **options).arguments
    del bound["self"], bound["schema"]
    bound |= bound.pop("deep", {})
    try:
        return {"name": name, "options": json.loads(json.dumps(plain(bound)))}
    except (TypeError, ValueError):
        return None


def options_of(model: nn.Module) -> dict[str, object] | None:
    """Returns the options from which :func:`create` made a model of a user's class. Returns None for other models."""
    try:
        options: dict[str, Any] | None = json.loads(json.dumps(vars(model).get(_OPTIONS)))
    except (TypeError, ValueError):  # for example a date
        return None
    return options


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _takes_schema(cls: type[nn.Module]) -> bool:
    """Returns whether the constructor's first parameter is the schema, by its name or its annotation."""
    try:
        _, first, *_ = inspect.signature(cls.__init__).parameters.values()
    except (TypeError, ValueError):  # ValueError: fewer than two
        return False
    if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.name == "schema" or first.annotation in (Schema, "Schema", "girih.Schema")

"""Models by name: those of girih, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from girih.config import check_call
from girih.config.user_code import blame
from girih.errors import ConfigError, nearest
from girih.models.dcn import DCN
from girih.models.dcnv2 import DCNv2
from girih.models.deepfm import DeepFM
from girih.models.din import DIN
from girih.models.dlrm import DLRM
from girih.models.dnn import DNN
from girih.models.fm import FM
from girih.models.lr import LR
from girih.models.mmoe import MMoE
from girih.models.user import load_class, takes_schema
from girih.models.wide_deep import WideDeep
from girih.schema import Schema

BY_NAME: dict[str, type[nn.Module]] = {
    "lr": LR,
    "fm": FM,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dnn": DNN,
    "dlrm": DLRM,
    "dcn": DCN,
    "dcnv2": DCNv2,
    "din": DIN,
    "mmoe": MMoE,
}


def create(
    name: str,
    schema: Schema,
    options: Mapping[str, Any] | None = None,
    where: str = "[model]",
    *,
    directory: Path | None = None,
) -> nn.Module:
    """Builds a model by name.

    Args:
        name: a key of :data:`BY_NAME`, or ``path/to/file.py:Class`` or ``package.module:Class``.
        options: the constructor's keywords, as TOML gives them. A user's constructor gets the schema
            as its first argument if that is called ``schema`` or annotated ``Schema``.
        where: names the options in errors, as in ``config.toml: [model]``.
        directory: what the path of a user's file is relative to; the working directory by default.

    Raises:
        ConfigError: an unknown name or option, one of the wrong type or out of range, or a user's
            module that cannot be loaded or built.
    """
    own = isinstance(name, str) and ":" in name
    if not own and (not isinstance(name, str) or name not in BY_NAME):
        hint = nearest(str(name), BY_NAME)
        raise ConfigError(
            f"{where}.name = {name!r}: unknown model{hint}; one of yours is path/to/file.py:Class"
        )
    cls = load_class(name, where, directory) if own else BY_NAME[name]
    with_schema = not own or takes_schema(cls)
    checked = check_call(cls, options or {}, f"{where} {name}", skip=1 if with_schema else 0)
    try:
        return cls(schema, **checked) if with_schema else cls(**checked)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:
        if own:
            reason = f"could not be built: {blame(error, inspect.getsourcefile(cls))}"
        elif isinstance(error, MemoryError) or "allocate" in str(error) or "Overflow" in str(error):
            reason = "of these options is larger than memory; lower its widths"
        else:
            raise
        raise ConfigError(f"{where}: {name} {reason}") from error

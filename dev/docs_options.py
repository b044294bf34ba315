"""Public names, and the options of classes and functions: the facts of the site's reference pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

import api
import griffe
import numpy as np

import girih
from girih.checkpoint.state import RunState
from girih.config import parameter_hints
from girih.config.sections import hints_of
from girih.config.train import MetricsOptions
from girih.data import Batch
from girih.data.dataset import ReadOptions
from girih.data.readers import CsvOptions, TextOptions
from girih.dense.options import Lamb
from girih.lifecycle.inheriting import Inherited
from girih.metrics import LabelMetrics, Scores
from girih.models.layers.mlp import MLP, DeepOptions, LayerOptions
from girih.models.loss import Targets
from girih.nn.embedding import RowOptions
from girih.strategies import Capabilities

TYPES = (
    Batch, Capabilities, girih.models.Embeddings, Inherited, LabelMetrics, Lamb, MetricsOptions, RunState, Scores, Targets,
)  # fmt: skip
"""Classes that public names take or return, and that ``girih.__all__`` does not have."""
READERS = (girih.read_parquet, girih.read_csv)
DESCRIBED_BY: dict[Any, tuple[Any, ...]] = {
    ReadOptions: READERS, TextOptions: READERS, CsvOptions: READERS, RowOptions: (girih.nn.EmbeddingBag,),
    LayerOptions: (MLP,), DeepOptions: (MLP,),
}  # fmt: skip
"""Options of ``Unpack[...]`` → the callables whose docstrings describe them, with defaults."""
ROLE = re.compile(r":\w+:`~?([^`]*)`|``([\w.]+)``")
PAGE = re.compile(r"`*docs/([\w/-]+\.md)`*")
"""A page of docs/ that a text names."""
DOCS = Path(__file__).resolve().parents[1] / "docs"
DEFAULT = re.compile(r" Default: `*(.+?)`*\.$")
REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a class or function. Its default may be ``REQUIRED``."""

    name: str
    hint: Any
    kind: Any
    default: Any
    meaning: str


@functools.cache
def public_names() -> dict[str, Any]:
    """Returns the public names, such as ``girih.optim.Adam``, with their objects, and ``TYPES`` by module and name."""
    names = [name for name, _ in api.public_names(api.load())]
    return {f"girih.{name}": operator.attrgetter(name)(girih) for name in names} | {
        path_of(kind): kind for kind in TYPES
    }


def is_in(target: Any, package: str) -> bool:
    return f"{getattr(target, '__module__', None)}.".startswith(f"{package}.")


def path_of(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def options_of(target: Any) -> list[Option]:
    """Returns the options of a class or function, with those of its bases and of ``Unpack[...]``."""
    function = constructor_of(target) if inspect.isclass(target) else target
    if not (is_in(function, "girih") or is_in(function, "torch.optim") or hasattr(target, "_fields")):
        return []
    hints = parameter_hints(function) or hints_of(target)
    parameters = list(inspect.signature(function).parameters.values())[inspect.isclass(target) :]
    parameters = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    unpacked = [get_args(hint)[0] for hint in hints.values() if get_origin(hint) is Unpack]
    more = dict.fromkeys(name for kind in unpacked for name in get_type_hints(kind))
    names = [*(each.name for each in parameters), *more]
    shared = meanings_in([source for kind in unpacked for source in DESCRIBED_BY[kind]], names)
    own = meanings_in([target], names)
    options = []
    for each in parameters:
        meaning = own.get(each.name) or shared.get(each.name, "")
        options.append(Option(each.name, hints.get(each.name), each.kind, default_of(each, target), meaning))
        more.pop(each.name, None)
    for name in more:
        meaning, default = with_default(name, hints[name], shared.get(name, ""))
        options.append(
            Option(name, hints[name], inspect.Parameter.KEYWORD_ONLY, default, own.get(name) or meaning)
        )
    return options


def constructor_of(kind: Any) -> Any:
    return kind.__new__ if kind.__init__ is object.__init__ else kind.__init__


def default_of(parameter: inspect.Parameter, target: Any) -> Any:
    """Returns the default of a parameter; an empty container for the mark of a dataclass's factory."""
    fields: dict[str, dataclasses.Field[Any]] = getattr(target, "__dataclass_fields__", {})
    factory = fields[parameter.name].default_factory if parameter.name in fields else dataclasses.MISSING
    return parameter.default if factory is dataclasses.MISSING else factory()


def with_default(name: str, hint: Any, meaning: str) -> tuple[str, Any]:
    """Splits the meaning of an option of ``Unpack[...]`` into the meaning alone and the default; that of X | None is None."""
    if NoneType in get_args(hint):
        return meaning, None
    if not (written := DEFAULT.search(meaning)):
        raise LookupError(f"{name}: no default; end its meaning in a docstring with 'Default: VALUE.'")
    return meaning[: written.start()], written[1] if hint is str else ast.literal_eval(written[1])


def meanings_in(targets: list[Any], names: list[str]) -> dict[str, str]:
    """Returns name → meaning, from ``Args:`` and ``Attributes:`` of docstrings, with those of bases; a later one counts."""
    kinds = griffe.DocstringSectionKind
    several = re.compile(rf"(?:^|(?<=\. ))({'|'.join(map(re.escape, names)) or '$'}): ")
    meanings: dict[str, str] = {}
    for each in (base for target in targets for base in reversed(getattr(target, "__mro__", (target,)))):
        text = inspect.cleandoc(each.__doc__ or "")
        for section in griffe.Docstring(text).parse("google", warnings=False):
            for entry in section.value if section.kind in (kinds.attributes, kinds.parameters) else ():
                first, *others = several.split(" ".join(entry.description.split()))
                heads = f"{entry.name} {entry.annotation}" if entry.name.endswith(",") else entry.name
                meanings |= dict.fromkeys(heads.split(", "), first.strip())
                meanings |= {name: text.strip() for name, text in zip(others[::2], others[1::2], strict=True)}
    return meanings


@functools.cache
def places() -> dict[str, str]:
    """Returns each public name, whole and without its module → the place of its documentation."""
    known = {name: path_of(target) for name, target in public_names().items() if callable(target)}
    return {name.rpartition(".")[2]: path for name, path in known.items()} | known


def title_of(page: str) -> str:
    """Returns the title of a page of docs/."""
    return (DOCS / page).read_text().splitlines()[0].removeprefix("# ")


def link(page: str, up: str) -> str:
    return f"[{title_of(page)}]({up}{page})"


def readable(text: str) -> str:
    """Returns a docstring's text with roles as code, which links to its page if it is a public name."""

    def fit(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        place = places().get(name)
        return f"[`{name}`][{place}]" if place else f"`{name}`"

    return ROLE.sub(fit, text)


def plain_type(hint: Any) -> str:
    """Returns a type as Python, without bounds, aliases and modules."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, list):
        return f"[{', '.join(map(plain_type, hint))}]"
    if origin is Annotated:
        return plain_type(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(map(plain_type, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is np.ndarray:
        return f"NDArray[{plain_type(get_args(parts[1])[0])}]"
    if parts:
        return f"{origin.__name__}[{', '.join(map(plain_type, parts))}]"
    return "None" if hint is NoneType else "..." if hint is ... else str(getattr(hint, "__name__", hint))

"""Errors for users of torch's embeddings, who try arguments and attributes that girih does not have."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar, cast

import torch
from torch import nn

from girih.errors import CheckpointError, ConfigError, nearest

Init = TypeVar("Init", bound=Callable[..., None])
Forward = TypeVar("Forward", bound=Callable[..., object])

UNCAPTURED = (
    "reads rows of a table that grows, which no graph can hold: trace, script or export the layers after it,"
    " and compile without fullgraph"
)
UNCOPIED = "rows have one owner and are neither copied nor pickled; load state_dict() into a new module"
ATTRIBUTES = {
    "weight": "rows are not a parameter; to read them, call module(ids) under torch.no_grad(), which makes no rows;"
    " to set them, call module.assign(ids, vectors)",
    "num_embeddings": "rows appear as ids are seen; module.num_rows counts them",
    "embedding_dim": "it is called dim",
    "reset_parameters": "a row has its initial value when its id is first seen; make a new module",
    "embedding_bags": "rows are not parameters; to read them, call module(ids) under torch.no_grad(), which makes no rows",
}
"""Attributes of torch's and TorchRec's modules, and their replacements."""

OPTIONS = {
    "num_embeddings": "rows appear as ids are seen; leave num_embeddings out, write {example}",
    "embedding_dim": "it is called dim; write {example}",
    "max_norm": "rows are never renormalized; leave it out",
    "norm_type": "rows are never renormalized; leave it out",
    "scale_grad_by_freq": "gradients of equal ids are summed; leave it out",
    "sparse": "only the rows of a batch ever move; leave it out",
    "device": "module.cuda() takes rows to a GPU; leave it out",
    "_weight": "to take trained weights, call {name}.from_torch(module)",
    "_freeze": "module.requires_grad_(False) keeps rows as they are; leave it out",
}
"""Arguments of torch's modules, and their replacements."""

_TRAINED = {
    name: f"load it into a torch.nn.{name}, and make this module by {name}.from_torch of that one"
    for name in ("Embedding", "EmbeddingBag")
}
"""Advice on turning trained weights into rows, by class."""
_WEIGHT = re.compile(r"weight|embedding_bags\.[^.]+\.weight")
"""The name of weights in a module of torch, and for each table in a module of TorchRec."""

_BY_FEATURE = "it is an option of features; write {example}"
_BY_TABLE = 'it is an option of tables, as in tables=[girih.Table(name="user", {option}=...)]'
COLLECTION = {
    **{name: told for name, told in OPTIONS.items() if name not in ("_weight", "embedding_dim")},
    **dict.fromkeys(("dim", "embedding_dim", "mode"), _BY_FEATURE),
    **dict.fromkeys(("initializer", "admission", "eviction", "dtype"), _BY_TABLE),
    "is_weighted": "weights come with the ids, as per_sample_weights; leave it out",
    "share": 'features of one table share its rows, as girih.Categorical(name="history", table="items")',
}
"""The same for a module of many features, also for TorchRec's arguments."""


def class_of(value: object) -> str:
    """Returns the class of a value with its module, such as ``a torch.optim.adam.Adam``."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def answers_movers(
    known: Iterable[str] = (), answers: Mapping[str, str] = OPTIONS, example: str = "{name}({width})"
) -> Callable[[Init], Init]:
    """Decorates an ``__init__``: arguments of torch's modules, and unknown arguments, raise ConfigErrors with a hint.

    Args:
        known: options in addition to the options in its signature.
        answers: option → the hint; example: how to construct the module.
    """

    def decorate(init: Init) -> Init:
        name, names = init.__qualname__.partition(".")[0], {*inspect.signature(init).parameters, *known}

        @functools.wraps(init)
        def checked(self: object, *arguments: object, **options: object) -> None:
            _check(name, names - {"self", "rows"}, arguments, options, answers, example)
            init(self, *arguments, **options)

        return cast(Init, checked)

    return decorate


def uncaptured(forward: Forward) -> Forward:
    """Decorates a ``forward`` that refuses a trace or an export, which would turn one batch's rows into constants.

    ``torch.compile`` leaves the call out of the graph, and refuses it under ``fullgraph``.
    """

    @functools.wraps(forward)
    def eager(self: object, *arguments: object, **options: object) -> object:
        is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or torch.compiler.is_compiling():
            raise ConfigError(f"{type(self).__name__} {UNCAPTURED}")
        return forward(self, *arguments, **options)

    disabled: Any = torch.compiler.disable(eager)  # type: ignore[no-untyped-call]
    disabled._torchdynamo_disable_msg = f"a girih.nn module {UNCAPTURED}"  # reason= of later torch
    return cast(Forward, disabled)


def refuse_ranks(module: nn.Module, description: str) -> None:
    """Refuses to train rows in several processes, or in copies of a module. Each copy would have its own rows.

    Args:
        description: of the module, at the beginning of the error.

    Raises:
        ConfigError: ``torch.distributed`` has more than one rank, or ``torch.nn.DataParallel`` has copied the module.
    """
    ranks = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    if ranks > 1:
        raise ConfigError(
            f"{description}: torch.distributed has {ranks} ranks, and each rank would train other rows; train with girih.Trainer and"
            f" strategy=girih.Synchronous(trainers={ranks}) under torchrun, in one process, or with rows frozen by requires_grad_(False)"
        )
    if getattr(module, "_is_replica", False):
        raise ConfigError(
            f"{description}: torch.nn.DataParallel copies modules, and rows have one owner; train in one process without it, or with"
            " girih.Trainer"
        )


def refuse_weights(module: nn.Module, where: str, state_dict: Mapping[str, object], prefix: str) -> None:
    """Refuses weights of torch's and TorchRec's modules in place of a module's own state.

    Parameters, buffers and modules of a subclass are its own state, so their keys pass. Keys of other modules also
    pass: with an empty prefix, the dict may belong to a whole model.

    Args:
        where: the beginning of the error.

    Raises:
        CheckpointError: the dict has such weights, and no rows.
    """
    if f"{prefix}_extra_state" in state_dict:
        return
    own = {*module._parameters, *module._buffers, *module._modules}
    for key, value in state_dict.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else ""
        if isinstance(value, torch.Tensor) and _WEIGHT.fullmatch(name) and name.partition(".")[0] not in own:
            way = _TRAINED.get(type(module).__name__, "set rows by module.assign")
            raise CheckpointError(
                f"{where}: state_dict has {key!r}, torch's weights of shape {tuple(value.shape)}; expected rows from the state_dict() of a"
                f" girih.nn module: {way}, or leave the key out"
            )


def _check(
    name: str,
    known: set[str],
    arguments: Sequence[object],
    options: Mapping[str, object],
    answers: Mapping[str, str],
    example: str,
) -> None:
    numbers = [argument for argument in arguments[:2] if isinstance(argument, SupportsIndex)]
    width = numbers[1] if len(numbers) == 2 else options.get("embedding_dim", options.get("dim", 16))
    example = example.format(name=name, width=width)
    if len(numbers) == 2:
        answer = answers["num_embeddings"].format(example=example)
        raise ConfigError(f"{name}({numbers[0]}, {numbers[1]}): {answer}")
    for option in options:
        if option in answers:
            answer = answers[option].format(name=name, example=example, option=option)
            raise ConfigError(f"{name}: {option}: {answer}")
        if option not in known:
            raise ConfigError(f"{name}: unknown option {option!r}{nearest(option, known)}")

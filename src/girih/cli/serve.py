"""``girih serve``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from girih.checkpoint import Storage
from girih.cli import cli, note
from girih.cli.words import MODEL, PATH, Callback
from girih.config.user_code import reference
from girih.errors import ConfigError
from girih.publishing.log import find_log
from girih.publishing.manifest import HEAD
from girih.serving.cached import exported, model_name
from girih.serving.following import Following
from girih.serving.limits import HOST, PORT, ServeOptions
from girih.serving.server import require_packages, serve
from girih.serving.signature import NAME, Signature

_DEFAULT = ServeOptions()


def _number(name: str, help: str) -> Callable[[Callback], Callback]:
    """Makes a numeric option of :class:`ServeOptions`."""
    default = getattr(_DEFAULT, name.removeprefix("--").replace("-", "_"))
    return click.option(name, metavar="N", type=type(default), default=default, show_default=True, help=help)


@cli.command("serve")
@click.argument("model", metavar="RUN|DIR|ADDRESS", type=click.Path())
@click.option("--follow", is_flag=True, help="Follow what a run publishes: RUN, or the ADDRESS of its log.")
@click.option(
    "--cache", metavar="DIR", type=PATH,
    help="With --follow, where to keep the rows on this machine. Default: a temporary directory.",
)  # fmt: skip
@click.option(
    "--name", metavar="NAME", help="The model's name for clients. Default: that of the export, or the run."
)
@MODEL
@click.option("--host", metavar="HOST", default=HOST, show_default=True)
@click.option(
    "--port", metavar="PORT", type=int, default=PORT, show_default=True, help="0 takes any that is free."
)
@_number("--workers", "Processes at one port.")
@_number("--threads", "Computing threads of each.")
@_number("--max-batch", "Examples of a request.")
@_number("--max-bytes", "Bytes of a request.")
@_number("--max-header-bytes", "Bytes of a request's line and headers.")
@_number("--max-unfinished-bytes", "Bytes that unfinished requests of all connections hold, of each process.")
@_number("--request-timeout", "Seconds from a request's first byte to its last.")
@_number("--max-connections", "Connections of each process.")
def serve_command(
    model: str, follow: bool, cache: Path | None, name: str | None, model_class: str | None, **numbers: Any
) -> int:
    """Answer requests for predictions by HTTP: Open Inference Protocol v2."""
    options = ServeOptions(model=None if model_class is None else reference(model_class), **numbers)
    if cache is not None and not follow:
        raise ConfigError("--cache: is for --follow; leave it out")
    if model_class is not None and (Path(model) / NAME).is_file():
        raise ConfigError(f"--model: {model} is an export, which needs no class; leave it out")
    if follow:
        _follow(model, cache, name or model_name(model), options)
    elif (Storage.at(model) / HEAD).exists():
        raise ConfigError(f"{model}: is a published log; add --follow, which serves its newest version")
    else:
        with exported(model, model_name(model), note, options.model) as directory:
            serve(directory, name or Signature.read(directory).name, options, _ready, note)
    return 0


def _follow(model: str, cache: Path | None, name: str, options: ServeOptions) -> None:
    """Serves the newest version that a run publishes."""
    require_packages()
    log = find_log(model)
    with contextlib.ExitStack() as closing:
        if cache is None:
            cache = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="girih-follow-")))
        note(f"following {log.root}")
        closing.enter_context(Following(log, cache.absolute(), note))
        serve(cache, name, options, _ready, note, follow=True)


def _ready(line: str) -> None:
    click.echo(f"serving {line}")

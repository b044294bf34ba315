"""``girih serve``."""

from __future__ import annotations

import click

from girih.cli import cli
from girih.cli.export import model_name
from girih.serving.cached import exported
from girih.serving.options import HOST, PORT, ServeOptions
from girih.serving.server import serve
from girih.serving.signature import Signature

_DEFAULT = ServeOptions()


@cli.command("serve")
@click.argument("model", metavar="RUN|DIR", type=click.Path())
@click.option(
    "--name", metavar="NAME", help="The model's name for clients. Default: that of the export, or the run."
)
@click.option("--host", metavar="HOST", default=HOST, show_default=True)
@click.option(
    "--port", metavar="PORT", type=int, default=PORT, show_default=True, help="0 takes any that is free."
)
@click.option(
    "--workers",
    metavar="N",
    type=int,
    default=_DEFAULT.workers,
    show_default=True,
    help="Processes at one port.",
)
@click.option(
    "--threads",
    metavar="N",
    type=int,
    default=_DEFAULT.threads,
    show_default=True,
    help="Computing threads of each.",
)
@click.option(
    "--max-batch",
    metavar="N",
    type=int,
    default=_DEFAULT.max_batch,
    show_default=True,
    help="Examples of a request.",
)
@click.option(
    "--max-bytes",
    metavar="N",
    type=int,
    default=_DEFAULT.max_bytes,
    show_default=True,
    help="Bytes of a request.",
)
def serve_command(
    model: str,
    name: str | None,
    host: str,
    port: int,
    workers: int,
    threads: int,
    max_batch: int,
    max_bytes: int,
) -> int:
    """Answer requests for predictions by HTTP: Open Inference Protocol v2."""
    options = ServeOptions(
        host=host, port=port, workers=workers, threads=threads, max_batch=max_batch, max_bytes=max_bytes
    )

    def tell(line: str) -> None:
        click.echo(line, err=True)

    with exported(model, model_name(model), tell) as directory:
        serve(
            directory,
            name or Signature.read(directory).name,
            options,
            lambda line: click.echo(f"serving {line}"),
        )
    return 0

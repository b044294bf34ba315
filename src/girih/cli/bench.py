"""``girih bench``."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import click

from girih.cli import cli
from girih.errors import ConfigError, MissingFileError, nearest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@cli.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[NAME] [OPTIONS]...")
def bench(words: tuple[str, ...]) -> int:
    """Measure this machine, and compare girih with its peers. Without NAME: list the benchmarks.

    Options are the benchmark's own: girih bench NAME --help.
    """
    names = benchmarks()
    if words and words[0] not in ("-h", "--help"):
        name, *options = words
        if name not in names:
            raise ConfigError(f"bench: unknown benchmark {name!r}{nearest(name, names)}")
        # A new process image has no threads or memory set up, and lets the benchmark handle signals and status.
        os.execv(sys.executable, [sys.executable, str(FOLDER / f"{name}.py"), *options])
    click.echo("girih bench NAME [OPTIONS]; girih bench NAME --help lists the options of one")
    for name, line in names.items():
        click.echo(f"  {name:12} {line}")
    return 0


def benchmarks() -> dict[str, str]:
    """Maps the name of each file with a ``main`` to the first line of its docstring.

    Raises:
        MissingFileError: this is an installed package, which contains no benchmarks.
    """
    if not FOLDER.is_dir():
        raise MissingFileError(
            f"bench: {FOLDER} is missing: benchmarks are in the source checkout, not in the installed package;"
            " clone the repository and run make setup there"
        )
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found

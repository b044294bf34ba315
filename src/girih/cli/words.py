"""Options that commands share, and options with several words: ``--keep user item`` is ``--keep user --keep item``.

A shell expands ``--data new/*.parquet`` to several words; click takes one value for each option.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

PATH = click.Path(path_type=Path)
RUN_OR_CHECKPOINT = click.argument("run", metavar="RUN|CHECKPOINT", type=click.Path())
FORMAT = click.option(
    "--format", "form", type=click.Choice(["parquet", "csv", "criteo", "libsvm", "libffm", "jsonl"]),
    help="Format of the files of --data. Default: that of the training data (Parquet for a stream).",
)  # fmt: skip
MODEL = click.option(
    "--model", "model_class", metavar="FILE.py:CLASS",
    help="Your own class, if the run's config may not name it, or there is none. See docs/security.md.",
)  # fmt: skip
Callback = TypeVar("Callback", bound=Callable[..., object])
OVERRIDE = "Override one value; repeatable."


def config_options(command: Callback) -> Callback:
    """Decorates a command that reads a config file: ``config_file, overrides, strategy``."""
    for option in (
        click.option("--strategy", metavar="NAME", help="Replace [strategy] whole."),
        click.option("--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help=OVERRIDE),
        click.argument("config_file", metavar="CONFIG.toml", type=PATH),
    ):
        command = option(command)
    return command


class Command(click.Command):
    """Repeats each option that may be given several times before each of its words.

    After the run or config, an option takes all words up to the next option. Before it, an option only takes words with
    an ``=``, because ``--data new.parquet RUN`` must not take the run.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See :class:`click.Command`. The context's ``obj`` is the typed arguments."""
        ctx.obj = list(args)
        options = [option for option in self.params if isinstance(option, click.Option)]
        several = {name for option in options if option.multiple for name in option.opts}
        valued = {name for option in options if not option.is_flag for name in option.opts}
        words: list[str] = []
        option, named = "", False
        for word in args:
            if word.startswith("-"):
                option = word if word in several else ""
            elif words and words[-1] in valued:
                pass  # the first value of the option
            elif option and (named or "=" in word):
                words.append(option)
            else:
                option, named = "", True
            words.append(word)
        try:
            return super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            if "--set" in several and (setting := _setting(error.option_name, args)):
                ctx.fail(f"No such option {error.option_name!r}; write {setting}")
            raise


def _setting(option: str, words: list[str]) -> str:
    """Returns the ``--set`` for an option that is a key of the config. Empty for other options."""
    from girih.app.run_config import keys_by_section

    key = option.lstrip("-").replace("-", "_")
    section = next((name for name, keys in keys_by_section().items() if key in keys), None)
    if section is None:
        return ""
    parts = [part for word in words for part in word.split("=", 1)]  # --epochs=3 is --epochs 3
    value = next(iter(parts[parts.index(option) + 1 :]), "")
    is_another = not value or value.startswith("-") or value.endswith(".toml")
    return f"--set {section}.{key}={'VALUE' if is_another else value}"

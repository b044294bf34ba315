"""Builds the documentation site from README.md and docs/ into site/, without a network. ``make docs``

    python dev/build_docs.py

Markdown stays the source. The script copies it to build/docs, adds the pages that come from the code (Python names, config keys,
commands), and runs Zensical in strict mode: a warning, a broken link or a missing anchor ends it with status 1.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import griffe
from api import MODULES, load, page_names, public_names
from docs_roles import ROLE

from girih import cli, optim
from girih.app.run_config import KINDS, keys_by_section
from girih.config.bounds import Bounds
from girih.config.sections import hints_of

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"
SITE = ROOT / "site"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

TUTORIALS = {
    "First model": "index.md",
    "From a DataFrame to a served model": "tutorials/dataframe-to-served-model.md",
    "A log that grows daily": "tutorials/a-log-that-grows-daily.md",
    "Your own model": "tutorials/your-own-model.md",
    "Your own PyTorch loop": "tutorials/your-own-pytorch-loop.md",
    "From one process to several": "tutorials/from-one-process-to-several.md",
}
GUIDES = {
    "Data": ("data.md", "labels.md", "quality.md"),
    "Training": ("daily.md", "python.md"),
    "Models and evaluation": ("models.md", "nn.md", "metrics.md", "comparing.md", "loading.md"),
    "Serving": ("publishing.md", "serving.md"),
    "Many processes": ("operations.md", "clusters.md", "scaling.md", "security.md", "checkpoints.md"),
    "Speed and memory": ("planning.md", "tiers.md", "precision.md", "gpu.md"),
    "Coming from": (
        "migrate/from-torchrec.md",
        "migrate/from-lightgbm.md",
        "migrate/from-fuxictr.md",
        "migrate/from-deepctr.md",
    ),
}
REFERENCE = (
    *("config.md", "reference/keys.md", "reference/commands.md", "hierarchical-reference.md"),
    *("glossary.md", "platforms.md", "stability.md", "changelog.md"),
)
EXPLANATION = {
    "Design": ("architecture.md", "strategies.md"),
    "Papers": ("persia.md", "des.md", "picasso.md", "hierarchical.md"),
    "Measurements": ("benchmarks.md", "claims.md"),
}
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Pages that are outside docs/ in the repository, and their places in the site."""
FOLDERS = {"Experiments": "experiments", "Decisions": "decisions"}
"""Sections of the explanation that have each page of a folder."""
PUBLIC = """\
# Public names

These are the public names of Python. All other names below `girih` are internal. [Stability](../stability.md) says what else is public,
and what a new version may change.

| name | meaning |
|---|---|
"""


def main() -> int:
    for folder in (BUILD, BUILD.parent / ".cache"):  # Zensical keeps a page until its Markdown changes
        shutil.rmtree(folder, ignore_errors=True)
    copy_pages()
    write(BUILD / "reference" / "keys.md", "".join(key_lines()))
    write(BUILD / "reference" / "commands.md", "".join(command_lines()))
    names = write_api()
    config = BUILD.parent / "zensical.json"
    write(config, json.dumps(settings(names)))
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    built = subprocess.run(
        [zensical, "build", "--strict", "--config-file", config], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    sys.stdout.write(built.stdout)
    if built.returncode or "griffe:" in built.stdout:
        return 1
    (BUILD.parent / SITE.name).rename(SITE)  # Zensical writes only below the folder of its config
    pages = len(list(SITE.rglob("index.html")))
    print(f"site/: {pages} pages")
    return 0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copy_pages() -> None:
    """Copies Markdown and pictures. The README becomes the first page; links to files outside the site become plain text."""
    docs = ROOT / "docs"
    for name, page in FROM_ROOT.items():
        write(BUILD / page, relink(ROOT / name, BUILD / page))
    for path in sorted(docs.rglob("*")):
        place = BUILD / path.relative_to(docs)
        if path.suffix == ".md":
            write(place, relink(path, place))
        elif path.suffix == ".svg":
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)


def relink(path: Path, place: Path) -> str:
    """The text of a page with links that fit its place in the site."""

    def fit(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        if not target or "://" in target:
            return match[0]
        file = (path.parent / target).resolve()
        if file.is_dir() and (file / "README.md").is_file():
            file /= "README.md"
        if file.parent == ROOT and file.name in FROM_ROOT:
            file = ROOT / "docs" / FROM_ROOT[file.name]
        elif not file.is_relative_to(ROOT / "docs") or file.suffix not in (".md", ".svg"):
            return text
        there = BUILD / file.relative_to(ROOT / "docs")
        up = len(place.parent.relative_to(BUILD).parts)
        return f"{mark}[{text}]({'../' * up}{there.relative_to(BUILD)}{anchor or ''})"

    text, parts, behind = path.read_text(), [], 0
    for block in CODE.finditer(text):
        parts += [LINK.sub(fit, text[behind : block.start()]), block[0]]
        behind = block.end()
    return "".join([*parts, LINK.sub(fit, text[behind:])])


def key_lines() -> Iterator[str]:
    """A table for each section of a config that has the same keys in each config, then each sparse optimizer's options."""
    yield "# Config keys\n\nThis page lists each key with its type and default. [Config files](../config.md) explains them with examples.\n"
    for section in keys_by_section():
        yield from table_of(f"[{section}]", KINDS[section])
    yield "\n## Sparse optimizers\n\nThe options of `[sparse_optimizer]`, by its `name`.\n"
    for kind in vars(optim).values():
        if inspect.isclass(kind) and kind.__module__ == optim.__name__ and not kind.__name__.startswith("_"):
            yield from table_of(kind.name, kind)


def table_of(title: str, kind: Any) -> Iterator[str]:
    described = {}
    for part in griffe.Docstring(inspect.getdoc(kind) or "").parse("google"):
        if part.kind in (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters):
            described |= {each.name: each.description for each in part.value}
    yield f"\n## `{title}`\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for each in dataclasses.fields(kind):
        default = "required" if each.default is dataclasses.MISSING else f"`{each.default!r}`"
        if each.default_factory is not dataclasses.MISSING:
            default = f"`{each.default_factory()!r}`"
        meaning = ROLE.sub(r"`\1`", " ".join(described.get(each.name, "").split()))
        cells = (f"`{each.name}`", type_text(hints_of(kind)[each.name]), default, meaning)
        yield "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |\n"


def type_text(hint: Any) -> str:
    """The values that a key takes, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [
            part.text(parts[0]) for part in parts[1:] if isinstance(part, Bounds) and parts[0] in (int, float)
        ]
        return bounds[0] if bounds else type_text(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part!r}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_text, parts)))
    if parts and isinstance(origin, type):
        inner = ", ".join(type_text(part) for part in parts if part is not ...)
        return f"{origin.__name__} of {inner}"
    return "None" if hint is NoneType else f"`{getattr(hint, '__name__', hint)}`"


def command_lines() -> Iterator[str]:
    """The help text of each command."""
    yield "# Commands\n\nThis page has the help text of each command, the same as `girih COMMAND --help` prints.\n"
    context = click.Context(cli.cli, info_name="girih")
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        if command is None:
            raise LookupError(f"command {name!r} is listed, and cannot be loaded")
        text = command.get_help(click.Context(command, info_name=name, parent=context))
        yield f"\n## girih {name}\n\n```text\n{text}\n```\n"


def write_api() -> list[str | dict[str, str]]:
    """A page for each public name below girih, and a page that lists all; returns their places in the navigation."""
    package = load()
    public = dict(public_names(package))
    names = sorted(page_names(package), key=str.lower)
    lines, places = [PUBLIC], []
    for name in names:
        parts = [each for each in public if each.startswith(f"{name}.")] if name in MODULES else []
        lines += [f"| [`girih.{name}`](api/{name}.md) | {summary_of(public[name])} |\n"]
        lines += [
            f"| [`girih.{part}`](api/{name}.md#girih.{part}) | {summary_of(public[part])} |\n"
            for part in parts
        ]
        options = {"heading": f"girih.{name}", "heading_level": 1, "show_root_heading": True}
        if parts:
            options["members"] = [part.removeprefix(f"{name}.") for part in parts]
        text = "".join(f"      {key}: {json.dumps(value)}\n" for key, value in options.items())
        write(BUILD / "reference" / "api" / f"{name}.md", f"::: {public[name].path}\n    options:\n{text}")
        places.append({f"girih.{name}": f"reference/api/{name}.md"})
    write(BUILD / "reference" / "python.md", "".join(lines))
    return ["reference/python.md", *places]


def summary_of(target: griffe.Object) -> str:
    """The first line of a docstring."""
    text = target.docstring.value if target.docstring else ""
    return ROLE.sub(r"`\1`", text.partition("\n")[0]).replace("``", "`").replace("|", "&#124;")


def settings(api: list[str | dict[str, str]]) -> dict[str, Any]:
    options = {
        "docstring_style": "google", "show_source": False, "show_root_heading": False, "show_root_toc_entry": False,
        "heading_level": 2, "merge_init_into_class": True, "separate_signature": True, "show_signature_annotations": True,
        "members_order": "source", "docstring_section_style": "list",
        "show_bases": False, "inherited_members": True, "filters": ["!^_[^_]", "!^__new__$", "!^misplaced_options$"], "extensions": [str(ROOT / "dev" / "docs_roles.py")],
        "docstring_options": {"warn_unknown_params": False, "warn_missing_types": False},
    }  # fmt: skip
    python = {"paths": [str(ROOT / "src")], "options": options}
    folders: list[Any] = [
        {title: [str(path.relative_to(BUILD)) for path in sorted((BUILD / folder).glob("*.md"))]}
        for title, folder in FOLDERS.items()
    ]
    nav: list[Any] = [
        {"Tutorials": [{title: page} for title, page in TUTORIALS.items()]},
        {"How-to guides": [{title: list(pages)} for title, pages in GUIDES.items()]},
        {"Reference": [*REFERENCE, {"Python": api}]},
        {"Explanation": [*({title: list(pages)} for title, pages in EXPLANATION.items()), *folders]},
    ]
    return {
        "site_name": "girih", "docs_dir": BUILD.name, "site_dir": SITE.name, "nav": nav,
        "theme": {
            "name": "material", "font": False, "features": ["navigation.tabs", "navigation.sections", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "toggle": {"icon": "lucide/sun", "name": "Dark"}},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "toggle": {"icon": "lucide/moon", "name": "Light"}},
            ],
        },
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": python}}}],
        "markdown_extensions": ["tables", "admonition", "toc", "pymdownx.superfences", "pymdownx.highlight"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

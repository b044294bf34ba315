"""Builds the documentation site from README.md and docs/ into site/, without a network. ``make docs``

    python dev/build_docs.py

Markdown stays the source. The script copies it to build/docs, adds the pages that come from the code (Python names, config keys,
commands), and runs Zensical in strict mode: a warning, a broken link or a missing anchor ends it with status 1.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from api import MODULES, load, page_names
from docs_keys import key_lines
from docs_options import (
    PAGE,
    TYPES,
    link,
    options_of,
    path_of,
    public_names,
    readable,
    title_of,
)

from girih import cli

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
    "Models and evaluation": (
        "models.md",
        "nn.md",
        "retrieval.md",
        "metrics.md",
        "comparing.md",
        "loading.md",
    ),
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
    "Measurements": ("benchmarks.md", "scale.md", "claims.md"),
}
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Pages that are outside docs/ in the repository, and their places in the site."""
FOLDERS = {"Experiments": "experiments", "Decisions": "decisions"}
"""Sections of the explanation that have each page of a folder."""
GUIDE_OF = {
    "data.md": "Batch Categorical Dataset Numeric Schema Sequence read_arrow read_criteo read_csv read_jsonl read_kafka read_libffm"
    " read_libsvm read_parquet",
    "labels.md": "Labels Targets",
    "daily.md": "Inherited Table tables",
    "python.md": "Callback EarlyStopping Lamb RunState TrainOptions Trainer errors",
    "models.md": "Embeddings models",
    "nn.md": "nn",
    "metrics.md": "LabelMetrics Metrics Scores",
    "comparing.md": "MLflow TensorBoard WandB",
    "loading.md": "LoadedModel load",
    "publishing.md": "PublishOptions",
    "operations.md": "MetricsOptions",
    "checkpoints.md": "CheckpointOptions",
    "tiers.md": "StoreOptions",
    "strategies.md": "Asynchronous Capabilities Hierarchical Hybrid Local ScheduleOptions Substitution Synchronous"
    " strategies.Strategy",
    "config.md": "optim",
}
"""Guide → the names whose pages link to it."""
HIDDEN = ("owner", "misplaced_options", "spans", "learning_rate", "restarts_all", "why_not_.*")
"""Attributes that pages leave out: those for other parts of girih, of types without a page."""
PUBLIC = """\
# Public names

These are the public names of Python. All other names below `girih` are internal. [Stability](../stability.md) says what else is public,
and what a new version may change. *Types you meet*, below Python, are classes whose objects girih gives to your code or takes from it.
They are internal too: check your code when you install a new version.

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
        [zensical, "build", "--strict", "--config-file", config],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # of the extension
        stdout=subprocess.PIPE,
        text=True,
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


def command_lines() -> Iterator[str]:
    """The help text of each command."""
    yield "# Commands\n\nThis page has the help text of each command, the same as `girih COMMAND --help` prints.\n"
    context = click.Context(cli.cli, info_name="girih")
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        if command is None:
            raise LookupError(f"command {name!r} is listed, and cannot be loaded")
        text = command.get_help(click.Context(command, info_name=name, parent=context))
        yield f"\n## girih {name}\n\n```text\n{PAGE.sub(lambda page: title_of(page[1]), text)}\n```\n"
        links = [link(page, "../") for page in dict.fromkeys(PAGE.findall(text))]
        yield f"\nSee {', '.join(links)}.\n" if links else ""


def write_api() -> list[Any]:
    """A page for each public name below girih and for each of ``TYPES``, and a list; returns their places in the navigation."""
    public = dict(public_names())
    for name, target in public.items():
        if lost := [each.name for each in options_of(target) if not each.meaning]:
            raise LookupError(f"{name}: no meaning of {', '.join(lost)}; add it to the docstring")
    lines: list[str] = [PUBLIC]
    places: list[Any] = ["reference/python.md"]
    for name in sorted(page_names(load()), key=str.lower):
        parts = (
            [each for each in public if each.rpartition(".")[0] == f"girih.{name}"] if name in MODULES else []
        )
        home = f"girih.{name}" if parts else path_of(public[f"girih.{name}"])
        places.append({f"girih.{name}": write_page(name, f"girih.{name}", home, parts)})
        lines += [
            f"| [`{each}`](api/{name}.md{'#' + each if each in parts else ''}) | {summary_of(public[each])} |\n"
            for each in (f"girih.{name}", *parts)
        ]
    write(BUILD / "reference" / "python.md", "".join(lines))
    types = [{kind.__name__: write_page(kind.__name__, kind.__name__, path_of(kind), [])} for kind in TYPES]
    return [*places, {"Types you meet": types}]


def write_page(name: str, title: str, home: str, parts: list[str]) -> str:
    """Writes the page of a public name; returns its place.

    Args:
        home: the module of the name and the name.
        parts: of a module: its public names.
    """
    guide = next((guide for guide, names in GUIDE_OF.items() if name in names.split()), None)
    if guide is None:
        raise LookupError(f"{name}: no guide; add it to GUIDE_OF in dev/build_docs.py")
    options: dict[str, Any] = {"heading": title}
    if parts:
        options["members"] = [part.rpartition(".")[2] for part in parts]
    lines = "".join(f"      {key}: {json.dumps(value)}\n" for key, value in options.items())
    place = f"reference/api/{name}.md"
    write(BUILD / place, f"::: {home}\n    options:\n{lines}\nGuide: {link(guide, '../../')}\n")
    return place


def summary_of(target: Any) -> str:
    """The first line of a docstring."""
    documented = inspect.ismodule(target) or callable(target)
    return (
        readable((inspect.getdoc(target) or "").partition("\n")[0]).replace("|", "&#124;")
        if documented
        else ""
    )


def settings(api: list[Any]) -> dict[str, Any]:
    options = {
        "docstring_style": "google", "show_source": False, "show_root_heading": True,
        "heading_level": 1, "merge_init_into_class": True, "separate_signature": True, "show_signature_annotations": True,
        "members_order": "source", "docstring_section_style": "list",
        "show_bases": False, "inherited_members": True,
        "filters": ["!^_[^_]", "!^__(new|init)__$", *(f"!^{name}$" for name in HIDDEN)],
        "signature_crossrefs": True, "extensions": ["docs_extension"],
        "docstring_options": {"warn_unknown_params": False, "warn_missing_types": False},
    }  # fmt: skip
    python = {"paths": [str(ROOT / "src")], "options": options}
    folders: list[Any] = [
        {title: [str(path.relative_to(BUILD)) for path in sorted((BUILD / folder).glob("*.md"))]}
        for title, folder in FOLDERS.items()
    ]
    nav: list[Any] = [
        {"Tutorials": [{title: page} for title, page in TUTORIALS.items()]},
        {"How-to guides": [*({title: list(pages)} for title, pages in GUIDES.items()), "troubleshooting.md"]},
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
        "markdown_extensions": ["tables", "admonition", "attr_list", "toc", "pymdownx.superfences", "pymdownx.highlight"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

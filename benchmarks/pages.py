"""Tables and sentences of the docs, written from docs/results. Measures nothing.

    girih bench pages                                         those of all results that exist
    girih bench NAME --from-results docs/results/NAME.json    those of one benchmark

A page has parts between ``<!-- NAME: PART -->`` and ``<!-- end -->``. ``page_parts`` of the benchmark NAME makes them from its
JSON. A part that the JSON has no rows for stays as it is. Single values that are missing are dashes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import harness
from experiments import RESULTS, markdown

BENCHMARKS = (
    "train", "kernels", "kernel_times", "capacity", "tiers", "data", "wire", "serving", "start", "slow_hosts", "slow_hosts_quality",
    "links", "picasso_table4", "picasso_fig3", "picasso_fig5", "paper_sizes", "prediction",
    "one_shard", "embedding_server",
)  # fmt: skip
"""Benchmarks that write parts of pages, each from ``docs/results/NAME.json``, with hyphens."""
PART = r"(<!-- {name}: ([\w ]+) -->\n)(.*?)(?=<!-- end -->)"
Parts = Mapping[str, str | None]
PageParts = Callable[[Mapping[str, Any]], Parts]


def main() -> None:
    harness.OneLineParser(
        prog="girih bench pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name in BENCHMARKS:
        file = RESULTS / f"{name.replace('_', '-')}.json"
        if file.is_file():
            write(importlib.import_module(name).page_parts, json.loads(file.read_text(encoding="utf-8")))


def add_option(parser: argparse.ArgumentParser, page_parts: PageParts) -> None:
    """Adds ``--from-results``, which writes the parts of pages and ends the program."""

    class FromResults(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, file: Any, option_string: Any = None) -> None:
            try:
                write(page_parts, json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError) as error:
                parser.error(f"{file}: {error!r}; expected the JSON of this benchmark")
            parser.exit()

    parser.add_argument(
        "--from-results", action=FromResults, type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="writes the tables and sentences of an earlier run into the pages; measures nothing",
    )  # fmt: skip


def write(page_parts: PageParts, results: Mapping[str, Any]) -> None:
    """Writes the parts of a benchmark into all pages that have them."""
    name, parts = results["benchmark"], page_parts(results)
    for page in all_pages():
        text = page.read_text(encoding="utf-8")
        if f"<!-- {name}: " in text:
            page.write_text(replaced(text, name, parts), encoding="utf-8")
            print(page.relative_to(harness.ROOT))


def all_pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [harness.ROOT / "README.md", *sorted((harness.ROOT / "docs").rglob("*.md"))]


def replaced(text: str, name: str, parts: Parts) -> str:
    """The text of a page with the parts of a benchmark."""

    def part(match: re.Match[str]) -> str:
        made = parts[match[2]]
        return match[0] if made is None else f"{match[1]}{made}\n"

    return re.sub(PART.format(name=name), part, text, flags=re.DOTALL)


def rows(results: Mapping[str, Any], title: str, **values: Any) -> list[dict[str, Any]]:
    """The rows with these values of all tables whose title begins so."""
    return [
        row
        for table in results["tables"] if table["title"].startswith(title)
        for row in table["rows"] if all(row.get(name) == value for name, value in values.items())
    ]  # fmt: skip


def row(results: Mapping[str, Any], title: str, **values: Any) -> dict[str, Any]:
    """The first of these rows. An empty one if there is none."""
    return next(iter(rows(results, title, **values)), {})


def shown(value: Any, form: str = "{}", scale: float = 1.0) -> str:
    """A value as a page has it; a dash if it is missing."""
    return "–" if value is None else form.format(value if scale == 1 else value * scale)


def times(ratio: float | None, form: str = "{:.2f}") -> str:
    """How many times as fast girih is; bold if it is slower."""
    return f"**{form.format(ratio)}**" if ratio is not None and ratio < 1 else shown(ratio, form)


def span(values: Iterable[float | None], form: str = "{:.2f}") -> str:
    """The lowest and the highest value, such as ``1.24 to 2.63``."""
    known = [value for value in values if value is not None]
    ends = list(dict.fromkeys(form.format(end(known)) for end in (min, max))) if known else ["–"]
    return " to ".join(ends)


def compared(ratios: Iterable[float | None], peer: str, where: str = "") -> str:
    """Sentences with the range and the mean of ratios, and the number of cases in which girih is slower."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return f"{peer[0].upper()}{peer[1:]} was not measured{where}."
    slower = sum(ratio < 1 for ratio in known)
    return (
        f"girih is {span(known)} times as fast as {peer}{where} (geometric mean {geometric_mean(known):.2f})."
        f" It is slower in {slower or 'none'} of {len(known)} cases."
    )


def measured(results: Mapping[str, Any]) -> str:
    """The day, the processor and the code of a run: the beginning of a sentence."""
    machine, tag = results["machine"], results["options"].get("resume")
    return (
        f"Measured on {datetime.date.fromisoformat(results['when'][:10]):%-d %B %Y}, {machine['cores']} core{'s' * (machine['cores'] != 1)} of"
        f" {re.sub(r'[(](R|TM)[)]', '', machine['processor'])}" + (f", code `{tag[:4]}…`" if tag else "")
    )


def bags(num_ids: int) -> str:
    """The size of bags."""
    return "one id per bag" if num_ids == 1 else f"bags of {num_ids}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str | None:
    """A Markdown table; None without lines."""
    cells = list(lines)
    return markdown(header, cells) if cells else None


def sentences(*texts: str) -> str:
    """One paragraph of the texts that are not empty."""
    return " ".join(text for text in texts if text)


def paragraphs(*texts: str | None) -> str | None:
    """Paragraphs; None if one of them is."""
    return None if any(text is None for text in texts) else "\n\n".join(map(str, texts))


def grouped(
    found: Iterable[dict[str, Any]], *names: str
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Values of some columns, and the rows that have them, in the order of the first of these rows."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault(tuple(each[name] for name in names), []).append(each)
    return ((dict(zip(names, key, strict=True)), those) for key, those in groups.items())


if __name__ == "__main__":
    main()

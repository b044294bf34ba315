"""docs/claims.md against the pages it quotes, the tests, commands and files it names, and the numbers of these files."""

import ast
import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from figures import faults, quoted
from kept_results import RESULTS, benchmark
from measured_tables import MEASURED, NOT_COMPARED, place_of, run_tags
from page_tables import compare, numbers, rounds_to, tables_of, unsigned

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "docs" / "claims.md"
PROMISES = {
    "README.md": "What you can rely on",
    "docs/strategies.md": "## What is promised",
    "docs/architecture.md": "## Invariants",
}
"""Pages whose bold beginnings of list items are promises, and where their list begins."""
FIGURES = (
    *("persia", "des", "picasso", "hierarchical", "gpu", "tiers", "quality", "precision", "benchmarks"),
    *(f"experiments/{page.stem}" for page in sorted((ROOT / "docs" / "experiments").glob("*.md"))),
)
"""Pages with tables of what was measured."""
CONSOLE_ONLY = {
    "0.8245",
    "2.1 GB at 1.03 times a plain write",
    "training loses 2.7 s",
    "0.9837 ± 0.0003",
}
"""Measured claims of which no result is kept. This set may only shrink."""
SUMMARIES = {"persia": {11}, "des": set(), "picasso": {1.09, 1.14}, "hierarchical": set()}
"""Pages with a table of results of a paper and of girih. The sets have the numbers that no table of the experiments has: shares."""
NUMBER = re.compile(
    r"^\|.*\| *\**[<+−-]?\d[\d.,]*(?: ?(?:[×%]|± [\d.]+))?\**(?: \([^|]*\))? *\|", re.MULTILINE
)
"""A row of a table with a cell that is a number."""


WRITTEN = {
    name: file
    for name in benchmark("pages").BENCHMARKS
    if (file := RESULTS / f"{name.replace('_', '-')}.json").is_file()
}  # fmt: skip
"""Benchmarks whose parts of pages are compared with a file of their results."""


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def flat(words):
    return re.sub(r"\s+", " ", words)


def rows():
    """(pages, claim, held by, figures) of every row."""
    pages = ()
    for line in LEDGER.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            pages = tuple(line[3:].split(", "))
        elif line.startswith("| ") and not line.startswith("| claim "):
            claim, held_by, *figures = (cell.strip() for cell in line.strip().strip("|").split(" | "))
            yield pages, claim, held_by, " ".join(figures)


ROWS = list(rows())


@cache
def functions(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def exists(word):
    """Whether there is such a test, command or file."""
    if word.startswith("tests/"):
        file, _, test = word.partition("::")
        return (ROOT / file).exists() and (not test or test in functions(file))
    if word.startswith("girih bench "):
        return (ROOT / "benchmarks" / f"{word.split()[2]}.py").is_file()
    if word.startswith("make "):
        return re.search(rf"^{word.split()[1]}:", text("Makefile"), re.MULTILINE) is not None
    if word.startswith("python "):
        return (ROOT / word.split()[1]).is_file()
    return word.startswith("docs/results/") and (ROOT / word).exists()


def is_measured(claim, held_by):
    """Whether a claim quotes numbers that a command measures, and no test holds."""
    return bool(quoted(claim)) and not all(
        word.startswith("tests/") for word in re.findall(r"`([^`]+)`", held_by)
    )


def stands_in_table(pages, claim):
    """Whether a compared table of one of the pages has a row with the claim."""
    tables = [measured.table for measured in MEASURED if f"docs/{measured.page}.md" in pages]
    return any(claim in " | ".join(row) for table in tables for row in table.rows)


def items(page):
    """Bold beginnings of the items of the list of promises."""
    after = text(page).partition(PROMISES[page])[2]
    return re.findall(r"^- \*\*(.*?)\*\*", re.split(r"^## ", after, flags=re.MULTILINE)[0], re.MULTILINE)


@pytest.mark.parametrize(
    ("pages", "claim", "held_by"), [row[:3] for row in ROWS], ids=[row[1][:50] for row in ROWS]
)
def test_a_claim_stands_on_its_page_and_something_holds_it(pages, claim, held_by):
    assert any(flat(claim) in flat(text(page)) for page in pages), f"not in {' or '.join(pages)}: {claim}"
    words = re.findall(r"`([^`]+)`", held_by)
    assert words, f"nothing holds: {claim}"
    assert [word for word in words if not exists(word)] == []


@pytest.mark.parametrize(
    ("pages", "claim", "figures"),
    [
        (pages, claim, figures)
        for pages, claim, held_by, figures in ROWS
        if figures or is_measured(claim, held_by)
    ],
)
def test_numbers_of_a_claim_are_those_of_its_result(pages, claim, figures):
    if figures == "console only":
        assert claim in CONSOLE_ONLY
    elif figures == "in a table":
        assert stands_in_table(pages, claim)
    else:
        named = re.findall(r"`([^`]+)`", figures)
        assert named, f"no result has the numbers of: {claim}"
        assert faults(claim, named) == []


def test_claims_without_a_result_become_fewer():
    assert {claim for _, claim, _, figures in ROWS if figures == "console only"} == CONSOLE_ONLY


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_is_listed(page):
    listed = {flat(claim) for pages, claim, *_ in ROWS if page in pages}
    assert items(page)
    assert [promise for promise in items(page) if flat(promise) not in listed] == []


def test_each_row_of_what_equals_what_names_a_test():
    section = text("docs/strategies.md").partition("## What equals what")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(table) > 5
    for line in table:
        (held_by,) = re.findall(r"`(tests/[^`]+)` \|$", line)
        assert exists(held_by), line


@pytest.mark.parametrize("name", FIGURES)
def test_every_section_with_measured_tables_names_the_command_that_makes_them(name):
    page = text(f"docs/{name}.md")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    for section in sections[1:] if "girih bench" not in sections[0] and "Made by" not in sections[0] else ():
        if NUMBER.search(section):
            commands = re.findall(
                r"girih bench (\w+)|python (recipes/\S+\.py)|`(girih inspect|girih plan)", section
            )
            assert commands, f"{name}.md, {section.splitlines()[0]}: no command makes its tables"


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_a_table_is_that_of_its_result(measured):
    assert measured.compared().faults == ()


def test_every_table_with_numbers_is_compared_or_listed():
    compared = {measured.table for measured in MEASURED} | {place_of(*key) for key in NOT_COMPARED}
    pages = {f"docs/{page}.md" for page, *_ in NOT_COMPARED} | {f"docs/{name}.md" for name in FIGURES}
    with_numbers = {
        table
        for page in pages
        for table in tables_of(page)
        if table.benchmark not in WRITTEN and any(map(numbers, (cell for row in table.rows for cell in row)))
    }
    assert [str(table) for table in with_numbers - compared] == []


@pytest.mark.parametrize("page", SUMMARIES)
def test_numbers_of_a_summary_are_those_of_the_experiments(page):
    summary = place_of(page, "Results", 0)
    experiments = [name for name in FIGURES if re.match(rf"experiments/{page}\b", name)]
    known_numbers = [
        number
        for measured in MEASURED
        if measured.page in experiments
        for row in measured.table.rows
        for cell in row
        for number in numbers(cell)
    ]
    known_numbers += [
        number
        for pages, claim, _, figures in ROWS
        if {f"docs/{name}.md" for name in (page, *experiments)} & set(pages) and "docs/results/" in figures
        for number, _ in quoted(claim)
    ]
    sizes = {abs(number.value) for number in known_numbers}
    for _, here, _ in summary.rows:
        for number in map(unsigned, numbers(here)):
            known = number.value in SUMMARIES[page] or any(rounds_to(size, number) for size in sizes)
            assert known, f"{number.value:g} of {here!r}"


def test_a_changed_digit_of_a_table_is_a_fault():
    (measured,) = (kept for kept in MEASURED if str(kept) == "experiments/persia-Figure_8-0")
    table, rows = measured.table, measured.rows()
    for place, row in enumerate(table.rows):
        for column, cell in enumerate(row):
            if table.header[column] not in measured.apart and (digits := re.search(r"\d(?=\D*$)", cell)):
                digit = str((int(digits.group()) + 1) % 10)
                changed = (
                    *row[:column],
                    cell[: digits.start()] + digit + cell[digits.end() :],
                    *row[column + 1 :],
                )
                other = dataclasses.replace(
                    table, rows=(*table.rows[:place], changed, *table.rows[place + 1 :])
                )
                assert compare(other, rows, apart=measured.apart).faults, f"{cell} in {table.header[column]}"


def test_a_changed_digit_of_a_claim_is_a_fault():
    (row,) = (row for row in ROWS if row[1].startswith("6.5 million ids/s"))
    figures = re.findall(r"`([^`]+)`", row[3])
    assert faults(row[1], figures) == []
    changed = row[1].replace("6.5", "6.6")
    assert len(faults(changed, figures)) == 2  # the number, and the figure that is left
    assert len(faults("6.5 million ids/s", figures)) == 1


@pytest.mark.parametrize("name", WRITTEN)
def test_pages_have_the_present_results(name):
    pages = benchmark("pages")
    parts = benchmark(name).page_parts(json.loads(WRITTEN[name].read_text(encoding="utf-8")))
    texts = [page.read_text(encoding="utf-8") for page in pages.all_pages()]
    assert [pages.replaced(page, name, parts) for page in texts] == texts
    used = {part for page in texts for part in re.findall(rf"<!-- {name}: ([\w ]+) -->", page)}
    assert used == set(parts)


@pytest.mark.parametrize("name", WRITTEN)
def test_pages_of_a_result_without_rows_stay_as_they_are(name):
    pages = benchmark("pages")
    results = json.loads(WRITTEN[name].read_text(encoding="utf-8"))
    parts = benchmark(name).page_parts(results | {"tables": []})
    assert set(parts.values()) == {None}
    for table in results["tables"]:
        table["rows"] = table["rows"][::3]
    for part in benchmark(name).page_parts(results).values():
        assert part is None or "None" not in part
    assert pages.replaced(f"<!-- {name}: x -->\nold\n<!-- end -->\n", name, {"x": None}).count("old") == 1


def test_ratios_below_one_are_counted_and_bold():
    pages = benchmark("pages")
    assert pages.compared([2.0, 0.5, None], "X", " here") == (
        "girih is 0.50 to 2.00 times as fast as X here (geometric mean 1.00). It is slower in 1 of 2 cases."
    )
    assert pages.compared([None], "the X") == "The X was not measured."
    assert [pages.times(ratio) for ratio in (1.5, 0.5, None)] == ["1.50", "**0.50**", "–"]


def test_the_page_names_the_code_that_made_each_run():
    (which,) = (kept for kept in tables_of("docs/benchmarks.md") if kept.section == "Which code")
    for folder, tags in run_tags().items():
        rows = " ".join(" ".join(row) for row in which.rows if f"`{folder}`" in row[0])
        assert {tag for tag in tags if f"`{tag}…`" not in rows} == set(), folder

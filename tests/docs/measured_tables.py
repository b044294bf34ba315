"""The measured tables of the pages, and the rows of their results."""

import json
import statistics
from dataclasses import dataclass

from kept_results import RESULTS, table
from page_tables import compare, numbers, tables_of


def pivot(rows, keys, over, columns):
    """One row for each value of the keys, with columns side by side for each value of ``over``."""
    merged = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        side = " ".join(str(row[name]) for name in over)
        merged.setdefault(key, dict(zip(keys, key, strict=True))).update(
            {f"{side}, {name}": row[name] for name in columns}
        )
    return list(merged.values())


def ratios(rows, *pairs):
    """Rows with another column for each (name, dividend, divisor)."""
    return [
        row | {name: _ratio(row.get(over), row.get(under)) for name, over, under in pairs} for row in rows
    ]


def _ratio(over, under):
    return over / under if over and under else None


def joined(rows, others, *keys):
    """Rows with the columns of the other rows that have the same keys."""
    by_key = {tuple(str(other[key]) for key in keys): other for other in others}
    return [row | by_key.get(tuple(str(row[key]) for key in keys), {}) for row in rows]


def bare(rows, **values):
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def wire_rows():
    return table("persia-wire/1gbit", "steps over") + table("persia-wire/200mbit", "steps over")


def caching_rows():
    """Table IV with the resident memory of the second table."""
    return joined(table("picasso-table4", "each part"), table("picasso-table4", "samples"), "workload", "arm")


def mesh_rows():
    return joined(
        table("des-table5", "ms a step"),
        table("des-table5", "bytes a step"),
        "link",
        "batch",
        "model",
        "strategy",
    )


def mesh_ratios():
    return pivot(
        table("des-table5", "how many"), ["batch", "model", "link", "paper: communication", "paper: samples/s"], ["beside"],
        ["communication", "and waiting", "bytes", "busiest direction", "samples/s of substitution"],
    )  # fmt: skip


def wait_rows():
    """What a trainer of the mesh waits for with τ = 0, and the processor time of the roles that it waits for."""
    rows = bare(table("des-table5", "ms a step"), link="1gbit", strategy="mesh, τ = 0")
    rows = joined(rows, table("des-table5", "ms of processors"), "link", "batch", "model", "strategy")
    rows = joined(rows, table("des-table5", "bytes a step"), "link", "batch", "model", "strategy")
    rows = joined(
        rows,
        bare(table("des-table5", "how many"), beside="substitution / mesh, τ = 0"),
        "link",
        "batch",
        "model",
    )
    return [
        row
        | {
            "waits": sum(numbers(row[f"waiting for {what}"])[0].value for what in ("rows", "updates")),
            "work": sum(int(row[f"embedding-{role}"]) for role in ("worker", "server")) / 2,
        }
        for row in rows
    ]


def threshold_rows():
    keys = ["columns", "ids", "bag", "ids per key"]
    two = [
        row | {"two": row["in place is x as fast"]} for row in table("thresholds-2-threads.json", "Copies")
    ]
    return joined(
        table("thresholds.json", "Copies"),
        [{name: row[name] for name in [*keys, "two"]} for row in two],
        *keys,
    )


def compression_rows():
    """Batches of the speed of hierarchical training, float32 and bfloat16 side by side."""
    rows = [
        row | dict(zip(("examples", "codec"), row["arm"].split(" examples, "), strict=True))
        for row in _speed("batches")
    ]
    return ratios(
        pivot(rows, ["examples"], ["codec"], ["samples/s"]),
        ("gained", "bfloat16, samples/s", "float32, samples/s"),
    )


def _speed(title):
    return table("hierarchical-speed.json", title)


def speed_rows():
    """Three tables that the page has side by side."""
    alone, nets = (_samples(_speed(title)) for title in ("trainers, ", "nets, "))
    groups = {row["arm"]: row["samples/s"] for row in _speed("groups, ")}
    arms = (
        ["EASGD, 1 trainer"],
        ["1 × (1, 1)"],
        ["1 × (2, 2)"],
        ["1 × (4, 4)", "1 × (4, 4), no FC splits"],
        ["2 × (2, 2)"],
    )
    return [
        {
            "arm": place, "trainers": alone[place : place + 1], "nets": nets[place : place + 1],
            "groups": [groups[arm] for arm in arms[place]],
        }
        for place in range(len(arms))
    ]  # fmt: skip


def _samples(rows):
    return [row["samples/s"] for row in rows]


def process_rows():
    """Cores and links by role, of the arms that the page has."""
    rows = bare(_speed("processor"), part="ablation")
    return [
        {
            "cores": [row["cores"] for row in those],
            "links": [row[way] for row in those for way in ("link out", "link in")],
        }
        for arm in ("rules and refinement", "no refinement")
        for role in ("trainer 0", "group-server")
        for those in [[row for row in rows if row["arm"] == arm and row["process"].startswith(role)]]
    ]


def scale_rows():
    """Predictions over links of 10 Gbit/s; some rows of the page have several arms."""
    by = {
        title: {row["arm"]: row for row in table("hierarchical-scale.json", f"{title}, 10 Gbit/s")}
        for title in (
            "by groups of (6, 6)",
            "by nodes of each of 8 groups",
            "groups of (6, 6) beside a copy for each trainer",
        )
    }
    groups, nodes, copies = by.values()
    more = [f"{number} groups" for number in (4, 6, 8, 10)]
    wanted = (
        [groups["2 groups"]], [groups[arm] for arm in more], [nodes["(2, 2)"]],
        [nodes[f"({number}, {number})"] for number in (4, 6, 8, 10)], [copies["EASGD, 40 trainers"]],
        [copies[arm] for arm in more[1:]],
    )  # fmt: skip
    return [
        {name: [row[name] for row in rows] for name in ("machines", "samples/s", "of the first")}
        for rows in wanted
    ]


def fault_rows():
    """Faults of a soak by role; stops of all roles but the loader are one row of the page."""
    faults = json.loads((RESULTS / "soak.minutes.json").read_text(encoding="utf-8"))["faults"]["faults"]
    stops = [seconds for _, kind, role, _, seconds in faults if kind == "stop" and role != "loader"]
    together = {"times": len(stops), "median": statistics.median(stops), "most": max(stops)}
    return [*table("soak.json", "from a fault"), together]


@dataclass(frozen=True)
class Measured:
    """A table of a page: the beginning of its section, its place there, and the rows of its result.

    Attributes:
        apart: columns that no result has, and columns of labels with numbers.
    """

    page: str
    section: str
    place: int
    rows: object
    apart: tuple = ()
    digits: int | None = None

    def __str__(self):
        return f"{self.page}-{self.section}-{self.place}".replace(" ", "_")

    @property
    def table(self):
        return place_of(self.page, self.section, self.place)

    def compared(self):
        return compare(self.table, self.rows(), apart=self.apart, digits=self.digits)


MEASURED = (
    Measured("experiments/persia", "Figure 8", 0, wire_rows, ("link",)),
    Measured("experiments/persia", "Table 2", 0, lambda: (
        table("strategy-quality", "quality") + table("strategy-quality/one-rate", "quality")
    )),
    Measured("experiments/persia", "Table 2", 1, lambda: table("strategy-quality", "how rates")),
    Measured("experiments/persia", "By trainers", 0, lambda: pivot(
        table("persia-fig8.json", "samples/s"), ["trainers"], ["strategy"], ["samples/s", "of synchronous", "CPU ms a step"]
    )),
    Measured("experiments/persia", "Figure 6", 0, lambda: table("persia-fig6", "seconds")),
    Measured("experiments/persia", "Figure 9", 0, lambda: pivot(
        table("persia-fig9", "left"), ["server's cores", "arena"], ["rows"], ["samples/s", "of the smallest", "server CPU ms a step"]
    )),
    Measured("experiments/persia", "Figure 9", 1, lambda: table("persia-fig9", "right"), ("the paper",)),
    Measured("experiments/persia", "Theorem 1", 0, lambda: table("persia-theorem1", "test AUC")),
    Measured("experiments/persia", "Balance", 0, lambda: table("persia-balance.json", "keys"), ("placement",)),
    Measured("experiments/des", "By the paper", 0, lambda: table("des-table2.json", "Table 2")),
    Measured("experiments/des", "On the wire", 0, lambda: table("des-table2.json", "bytes that a trainer sends")),
    Measured("experiments/des", "Where substitution loses", 0, lambda: table("des-table2.json", "bytes that a trainer would")),
    Measured("experiments/des", "Table 5", 0, mesh_rows),
    Measured("experiments/des", "Table 5", 1, mesh_ratios),
    Measured("experiments/des", "Table 5", 2, wait_rows),
    Measured("experiments/des-quality", "Tables 3 and 4", 0, lambda: table("strategy-quality", "quality")),
    Measured("experiments/des-quality", "Tables 3 and 4", 1, lambda: table("strategy-quality", "how rates")),
    Measured("experiments/des-quality", "Table 3", 0, lambda: table("stream", "AUC of each day")),
    Measured("experiments/picasso", "Table III", 0, lambda: table("picasso-table3", "AUC by batch")),
    Measured("experiments/picasso", "Table IV", 1, caching_rows),
    Measured("experiments/picasso-packing-caching", "Table V:", 0, lambda: table("picasso-table5.json", "operations")),
    Measured("experiments/picasso-packing-caching", "Table VI:", 0, lambda: table("picasso-table6", "hit ratio"), ("best possible", "best possible with these", "of it")),
    Measured("experiments/picasso", "Table VII:", 0, lambda: pivot(
        table("picasso-table7", "twelve"), ["model"], ["optimised"],
        ["samples/s", "cores busy", "MB a step, busiest direction", "of unoptimised", "paper"],
    )),
    Measured("experiments/picasso", "Table VIII", 0, lambda: table("picasso-table8", "samples/s")),
    Measured("experiments/picasso", "Figure 14", 0, lambda: pivot(
        table("picasso-fig15", "samples/s"), ["workload"], ["what", "number"], ["samples/s", "of one"]
    )),
    Measured("experiments/picasso-packing-caching", "Packing alone", 0, lambda: table("kernels-packing.json", "Packing")),
    Measured("experiments/hierarchical", "Five million", 0, lambda: table("hierarchical-quality/generated", "normalised")),
    Measured("experiments/hierarchical", "KuaiRand", 0, lambda: (
        table("hierarchical-quality/kuairand", "normalised") + table("hierarchical-quality/decayed", "normalised")
    )),
    Measured("experiments/hierarchical", "Fewer bits", 0, lambda: table("hierarchical-quality/eight-bits", "normalised")),
    Measured("experiments/hierarchical", "Speed", 0, speed_rows, ("trainers with a copy each (Figure 3a)", "nets of one trainer (Figure 4a)", "one group of (trainers, group servers), 2 nets"), 3),
    Measured("experiments/hierarchical", "Rules, refinement", 0, lambda: _speed("ablation"), ("one group of (2, 2), 2 nets (Figure 11)",), 3),
    Measured("experiments/hierarchical", "Rules, refinement", 1, compression_rows, (), 3),
    Measured("experiments/hierarchical", "Rules, refinement", 2, process_rows),
    Measured("experiments/hierarchical", "Prediction", 0, scale_rows, ("links of 10 Gbit/s", "the paper"), 3),
    Measured("benchmarks", "thresholds", 0, threshold_rows),
    Measured("benchmarks", "freshness", 0, lambda: table("freshness.json", "from an update")),
    Measured("benchmarks", "ssd_reads", 0, lambda: table("ssd-reads.json", "20,000")),
    Measured("operations", "What comes back", 1, lambda: table("faults.json", "one process")),
    Measured("operations", "What comes back", 2, fault_rows, ("killed, or stopped for 10 s",)),
    Measured("serving", "Limits", 1, lambda: table("serving-clients.json", "200 greedy")),
    Measured("gpu", "Registers", 0, lambda: table("gpu-registers.json", "sm_90")),
    Measured("gpu", "Figures", 0, lambda: table("gpu.json", "copies of")),
    Measured("gpu", "Figures", 1, lambda: table("gpu.json", "the sparse half")),
    Measured("gpu", "Figures", 2, lambda: table("gpu.json", "kernels of")),
    Measured("gpu", "Figures", 3, lambda: table("gpu.json", "keys alone")),
    Measured("gpu", "Figures", 4, lambda: table("gpu.json", "whole models")),
    Measured("gpu", "Figures", 5, lambda: table("gpu.json", "other tables")),
)  # fmt: skip


SUMMARY = "its numbers are those of the tables of the experiments, which a test checks"

NOT_COMPARED = {
    ("persia", "Results", 0): SUMMARY,
    ("des", "Results", 0): SUMMARY,
    ("picasso", "Results", 0): SUMMARY,
    ("hierarchical", "Results", 0): SUMMARY,
    ("experiments/des", "Time formulas", 0): "three runs whose files were not kept",
    ("experiments/picasso", "Table IV", 0): "the paper's numbers",
    ("hierarchical-reference", "Fewer bits", 0): "sizes of codecs, by definition",
    ("hierarchical-reference", "Averaging", 0): "formulas",
    ("hierarchical-reference", "Tested properties", 0): "names of tests",
    ("gpu", "How a batch goes", 0): "what kernels read and write, by design",
    ("gpu", "A faster order", 0): "counts of instructions, console only",
    ("gpu", "Instructions", 0): "counts of instructions, console only",
    ("gpu", "How a batch goes between", 0): "steps of an algorithm",
    ("gpu", "The dense half", 0): "counts that a test holds",
    ("gpu", "make gpu", 0): "a list of stages",
    ("gpu", "Figures", 6): "goals next to figures of the tables above",
    ("serving", "Limits", 0): "defaults of options",
    ("tiers", "Memory and disk space", 0): "sizes, by definition",
    ("quality", "Quality on", 0): "console only",
    ("precision", "frappe", 0): "console only",
    ("precision", "kuairand", 0): "console only",
    ("benchmarks", "Which code", 0): "tags, which a test of their own compares",
    ("benchmarks", "Peers", 0): "names",
    ("planning", "What is measured", 0): "options",
    ("planning", "What a step takes", 0): "options",
    ("planning", "What a step takes", 1): "fields",
    ("planning", "What a step takes", 2): "operations",
    ("planning", "Memory", 0): "the layout of rows, by design",
    ("planning", "Memory", 1): "counts that tests hold",
    ("operations", "Metrics", 0): "names",
    ("operations", "What comes back", 0): "limits, by definition",
    ("operations", "When a trainer", 0): "what happens, held by tests",
    ("serving", "Inputs", 0): "names",
    ("serving", "The protocol", 0): "names",
    ("data", "Formats", 0): "names",
    ("data", "Missing values", 0): "names",
    ("data", "Speed", 0): "console only",
}
"""Tables with numbers that no result file is compared with, and why. Those of measurements may only become fewer."""


def place_of(page, section, place):
    """The table at a place of a page."""
    return [kept for kept in tables_of(f"docs/{page}.md") if kept.section.startswith(section)][place]


def run_tags():
    """Folder of runs → beginnings of the tags of the code that made them."""
    tags = {}
    for file in RESULTS.glob("*/**/*.json"):
        tag = json.loads(file.read_text(encoding="utf-8")).get("code")
        if tag is not None:
            tags.setdefault(file.relative_to(RESULTS).parts[0], set()).add(tag[:4])
    return tags

"""Finds prose that is hard to read, in Markdown, docstrings, comments and messages. ``make prose``

    python dev/prose.py [PATH ...] [--worst 40] [--per-file]

Counts sentences of more than 25 words, and turns of phrase that plain technical English does not use. Prints, per kind of
text, sentences, the share that is too long, and odd turns per 1,000 words; then the worst sentences with file and line.
Without paths it measures README.md, docs and src/girih. Then the status is 1 if a kind exceeds its limit in limits.json.
"""

import argparse
import ast
import io
import pathlib
import re
import sys
import tokenize

import limits

ROOT = pathlib.Path(__file__).parents[1]

LONG = 25
LIMIT = "odd turns per 1,000 words"
ODD = {
    r"\b(?:is|are|was|were) told\b|\btells? (?:it|so|of)\b|\bas (?:was )?told\b": "told: say reported, logged, printed",
    r"^(?:What|Whose|Of|Nor|That which)\b(?!.*\?)": "begins with What/Whose/Of: begin with the subject",
    r"\bso many\b": "so many: name the number",
    r"\bas (?:the |an? |\w+s )?\w+(?: \w+)? (?:has|have|says?) it\b": "as X has it: say 'the same as in X'",
    r"\b(?:amid|anew|lest|whereof|thereof|whence|hence|likewise|alike|beforehand|aright|nought|oneself)\b": "archaic word",
    r"\b(?:is|are) (?:there )?to (?:be |have )?\w+": "is to: say must, will or should",
    r"\bnor (?:does|do|is|are|has|can)\b": "nor does: a sentence of its own",
    r"\bwhatever (?:the|its|their|way|it)\b": "whatever the: say 'for any' or 'regardless of'",
    r"\bbeside\b": "beside: say next to, compared with, or while",
    r"\b(?:steps?|batch\w*|one|those|it) behind\b|\bbehind (?:the|it|that|them)\b": "behind (in time): say after",
    r"\bno (?:\w+ )?(?:but|other than)\b|\ball but\b|\bnothing but\b": "all but: say only, or except",
    r"\bcomes? (?:of|to lie)\b|\bcame of\b": "came of: say result",
    r"\b(?:stands?|lies|lie) (?:beside|below|there|in|on|behind|before|here)\b": "lies/stands: say is",
    r"\bmends?\b|\bmended\b": "mend: say fix",
    r"\bwhere (?:there (?:is|are)|it|that|one|no|any|they)\b": "where (condition): say if or when",
    r"\bas far as\b|\bin so far\b|\binsofar\b": "as far as: say if, or up to",
    r"\b(?:the )?ones? that\b.*\b(?:one|ones) that\b": "one that ... one that",
    r"\bdo(?:es)? it\b(?! )": "do it: name the action",
    r"\bof (?:its|their|one's) own\b": "of its own: say its own X",
    r"\bheld (?:to|against)\b|\bholds? (?:it|them|this) to\b": "held to: say checked against",
    r"\bone (?:may|has|would|writes)\b": "one: say you",
}
ODD = {re.compile(k, re.I): v for k, v in ODD.items()}


def sentences(text):
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    text = re.sub(r"``?[^`]*``?", "X", text)
    for part in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*(\"X])|\n\s*\n|\n\s*[-*|] ", text):
        part = re.sub(r"\s+", " ", part.replace("|", " ")).strip(" *_#->")
        if len(re.findall(r"[A-Za-z]{2,}", part)) >= 4:
            yield part


def markdown(path):
    text = path.read_text(errors="replace")
    text = re.sub(r"```.*?```", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    text = re.sub(r"<!--.*?-->", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    line = 1
    for block in re.split(r"(\n\s*\n)", text):
        rows = [
            r
            for r in block.split("\n")
            if not re.match(r"\s*\|?[\s:|-]+\|?\s*$", r)
            and not (r.lstrip().startswith("|") and len(re.findall(r"\d", r)) > 12)
        ]
        for s in sentences("\n".join(rows)):
            yield "docs", line + max(0, block.count("\n", 0, max(0, block.find(s[:20])))), s
        line += block.count("\n")


def python(path):
    text = path.read_text(errors="replace")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc:
                docs.add(id(node.body[0].value))
                for s in sentences(
                    re.sub(
                        r"^\s*(?:Args|Raises|Returns|Attributes|Yields):|^\s{2,}\w+(?:, \w+)*: |[│├└─]+",
                        "\n\n",
                        doc,
                        flags=re.M,
                    )
                ):
                    yield "docstrings", node.body[0].lineno, s
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", words)) >= 6:
            for s in sentences(words):
                yield "messages", node.lineno, s
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for s in sentences(token.string.lstrip("# ")):
                yield "comments", token.start[0], s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--worst", type=int, default=40)
    parser.add_argument("--per-file", action="store_true")
    parser.add_argument("--lower", action="store_true")
    options = parser.parse_args()
    files = []
    for name in options.paths or ("README.md", "docs", "src/girih"):
        path = pathlib.Path(name) if options.paths else ROOT / name
        files += sorted(p for p in path.rglob("*") if p.suffix in (".md", ".py")) if path.is_dir() else [path]
    kinds, worst, by_file = measure(files)
    print(
        f"{'kind':<11}{'sentences':>10}{'words':>9}{'mean words':>12}{'over 25 words':>15}{'odd turns / 1,000 words':>26}"
    )
    for kind, (n, words, long, odd) in sorted(kinds.items()):
        print(f"{kind:<11}{n:>10,}{words:>9,}{words / n:>12.1f}{long / n:>15.1%}{1000 * odd / words:>26.2f}")
    if options.per_file:
        for path, cost in sorted(by_file.items(), key=lambda x: -x[1])[: options.worst]:
            print(f"{cost:8.1f}  {path}")
    else:
        for _, place, s, odd in sorted(worst, key=lambda x: -x[0])[: options.worst]:
            print(f"\n{place}  ({len(s.split())} words)\n  {s[:400]}\n  {'; '.join(sorted(set(odd)))}")
    if options.paths:
        return 0
    return limits.compare(
        {LIMIT: {kind: round(1000 * odd / words, 2) for kind, (_, words, _, odd) in kinds.items()}}
    )


def measure(files):
    """Counts by kind of text, sentences that cost most, and the cost of each file."""
    kinds, worst, by_file = {}, [], {}
    for path in files:
        for kind, line, s in (markdown if path.suffix == ".md" else python)(path):
            words = len(s.split())
            odd = [why for pattern, why in ODD.items() for _ in pattern.findall(s)]
            row = kinds.setdefault(kind, [0, 0, 0, 0])
            row[0] += 1
            row[1] += words
            row[2] += words > LONG
            row[3] += len(odd)
            cost = max(0, words - LONG) / 10 + len(odd)
            by_file[path] = by_file.get(path, 0) + cost
            if cost >= 1.5:
                worst.append((cost, f"{path}:{line}", s, odd))
    return kinds, worst, by_file


if __name__ == "__main__":
    sys.exit(main())

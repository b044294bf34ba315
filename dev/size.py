"""Measures the library: lines and tokens of code per room. ``make size``

Lines of code have no docstrings, comments and blanks. Tokens have no comments, docstrings and line breaks, so long lines
do not hide code. The status is 1 if a room exceeds its limit in limits.json.
"""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import sys
import tokenize

import limits

ROOT = pathlib.Path(__file__).parents[1] / "src" / "girih"
QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def main() -> int:
    lines: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        room = parts[0] if len(parts) > 1 else "(top)"
        text = path.read_text()
        docs = docstring_lines(ast.parse(text))
        files[room] += 1
        lines[room] += sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in docs
            for number, line in enumerate(text.splitlines(), 1)
        )
        tokens[room] += sum(
            token.type not in QUIET and token.start[0] not in docs
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
        )
    for room, count in lines.most_common():
        print(f"{count:7,} lines {tokens[room]:8,} tokens {files[room]:4} files  {room}")
    print(f"{lines.total():7,} lines {tokens.total():8,} tokens {files.total():4} files  in all")
    return limits.compare({"lines": lines, "tokens": tokens})


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                lines |= set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


if __name__ == "__main__":
    sys.exit(main())

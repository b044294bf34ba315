"""Hints for the end of errors about invalid TOML."""

from __future__ import annotations

import re
from pathlib import Path

_NO_CONFIG = "; expected a config in TOML, for example from girih init DATA > config.toml"
_AT_LINE = re.compile(r"at line ([0-9]+)")
_KEY, _BARE_STRING = re.compile(r"[\w.-]+"), re.compile(r"[A-Za-z_/~$*][^\s\"'\\]*")
_DECLARED_TWICE = re.compile(r"Cannot declare \('(\w+)',\) twice")
_LISTED, _SHOWN_VALUE = ("features", "tables"), 200


def no_config(file: Path) -> str:
    """Returns a hint for a file whose name is not a config's; "" otherwise."""
    return "" if file.suffix.lower() == ".toml" else _NO_CONFIG


def mend(file: Path, text: str, error: str) -> str:
    """Returns a hint for invalid TOML if the intention is clear; "" otherwise."""
    twice = _DECLARED_TWICE.match(error)
    if twice and twice[1] in _LISTED:
        return f"; several of them are written [[{twice[1]}]]"
    if twice:
        return "; join the two sections"
    at = _AT_LINE.search(error)
    lines = text.split("\n")
    line = lines[int(at[1]) - 1].strip() if at and int(at[1]) <= len(lines) else ""
    key, equals, value = (part.strip() for part in line.partition("#")[0].partition("="))
    if error.startswith("Invalid value") and equals and _KEY.fullmatch(key) and len(value) < _SHOWN_VALUE:
        if value.lower() in ("true", "false"):
            return f"; write {key} = {value.lower()}"
        if _BARE_STRING.fullmatch(value):
            return f'; text needs quotes: {key} = "{value}"'
    return no_config(file)

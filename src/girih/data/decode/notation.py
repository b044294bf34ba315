"""Numbers in text as people of a country write them: ``1.234,56 €``, ``$1,234.50``, ``12 %``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from girih.config.options import Options
from girih.errors import ConfigError

_NEGATIVE = r"^\s*(?:([^\d()]*)\(([^()]*)\)|−([^−]*)|([^-]*)-)\s*$"
_SPELLED = r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$"
_BLANKS = r"[\s\x{a0}\x{202f}]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation(Options):
    """The spelling of numbers in text files.

    Attributes:
        decimal: the mark before the fraction. thousands: the mark between groups of digits.
        units: texts before or after a number that are left out, as ``%``, ``$`` and ``€``; 50 % is the number 50.
    """

    decimal: str = "."
    thousands: str | None = None
    units: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for name, mark in (
            ("decimal", self.decimal),
            ("thousands", " " if self.thousands is None else self.thousands),
        ):
            if len(mark) != 1 or mark.isalnum() or mark in "+-\n":
                raise ConfigError(f"{name} = {mark!r}: expected one character, such as '.' or ','")
        if self.decimal == self.thousands:
            raise ConfigError(f"decimal and thousands are both {self.decimal!r}; expected different ones")
        for unit in self.units:
            if not unit.strip() or any(mark.isdigit() for mark in unit):
                raise ConfigError(f"units: {unit!r}: expected texts without digits, as '%', '$' or 'EUR'")

    def plain(self, words: Any) -> Any:
        """Numbers in text as programs write them, ``1234.56``; other text becomes ``?``, null and blank text null."""
        mark = re.escape(self.thousands or "")
        groups = rf"|[1-9]\d{{0,2}}(?:{mark}\d{{2,3}})*{mark}\d{{3}}" if mark else ""
        units = f"(?:{'|'.join(map(re.escape, self.units))})?{_BLANKS}" if self.units else ""
        read = pc.extract_regex(
            pc.replace_substring_regex(words, _NEGATIVE, r"-\1\2\3\4"),
            rf"^{_BLANKS}(?P<a>[-+]?){_BLANKS}{units}(?P<b>[-+]?)(?P<whole>\d+{groups}|)"
            rf"(?P<part>(?:{re.escape(self.decimal)}\d*)?)(?P<power>(?:[eE][-+]?\d+)?){_BLANKS}{units}$",
        )
        fields = {name: pc.struct_field(read, name) for name in ("a", "b", "whole", "part", "power")}
        if self.thousands:
            fields["whole"] = pc.replace_substring(fields["whole"], self.thousands, "")
        fields["part"] = pc.replace_substring(fields["part"], self.decimal, ".")
        text = pc.binary_join_element_wise(*fields.values(), pa.scalar("", words.type))
        text = pc.if_else(pc.fill_null(pc.match_substring_regex(text, _SPELLED), False), text, "?")
        return pc.if_else(pc.fill_null(pc.match_substring_regex(words, rf"^{_BLANKS}$"), True), None, text)

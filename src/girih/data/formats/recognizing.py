"""Recognizes a file's format by its first bytes, regardless of its name, for errors about unexpected formats."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

HEAD_BYTES = 1 << 16
"""Number of decompressed bytes that recognize a file."""
SEPARATORS = "\t,;|"
CRITEO_CELLS = 40
PARQUET = b"PAR1"
_CONTROL, _NEAR = re.compile(rb"[\x00-\x08\x0e-\x1f]"), 64
"""Bytes that text never contains, and the number of bytes at the start of a file that are searched for them."""
LIBSVM = re.compile(rb"[-+.0-9eE]*( +[0-9]+:[-+.0-9eE]+)+ *(#.*)?")
LIBFFM = re.compile(rb"[-+.0-9eE]*( +[0-9]+:[0-9]+:[-+.0-9eE]+)+ *(#.*)?")
_SLOT = rb"[^\s:,;|\"]+:\S+"
_SLOTS = re.compile(rb"([-+.\d]+ +(?=\S))?(?=\S*[A-Za-z_]\S*:)%b( +%b)* *(#.*)?" % (_SLOT, _SLOT))
_ARROW = "write it as Parquet, or give it to girih.read_arrow"
_AS_PARQUET, _AS_CSV = "write it as Parquet", "save it as CSV or Parquet"
_UNPACK = "unpack it; text may be compressed by gzip, bzip2, xz or zstd"
_BINARY = {
    b"ARROW1": ("an Arrow IPC (Feather) file", _ARROW),
    b"\xff\xff\xff\xff": ("an Arrow IPC stream", _ARROW),
    b"ORC": ("ORC", _AS_PARQUET),
    b"Obj\x01": ("Avro", _AS_PARQUET),
    b"\x93NUMPY": ("an array of NumPy", _AS_PARQUET),
    b"FEA1": ("a Feather file", _ARROW),
    b"\xd0\xcf\x11\xe0": ("an Excel file (xls)", _AS_CSV),
    b"%PDF": ("PDF", _AS_CSV),
    b"7z\xbc\xaf": ("a 7z archive", _UNPACK),
    b"\x04\x22\x4d\x18": ("LZ4", _UNPACK),
    b"\xff\x06\x00\x00sNaPpY": ("Snappy", _UNPACK),
    b"\x89HDF": ("HDF5", _AS_PARQUET),
    b"SQLite format 3": ("a database of SQLite", _AS_PARQUET),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
}
_TEXTS = (
    (rb"(?i)\s*<(!doctype|html|head|body|\?xml)", "HTML or XML", "get the file itself, as CSV or Parquet"),
    (rb"sep=.\r?\n", "CSV of Excel below a line sep=", "remove that line"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "run git lfs pull"),
    (rb"(?i)(--[^\n]*\n|\s)*(create|drop|insert|set|use) [^,\n]*", "a dump of SQL", _AS_CSV),
    (rb"[^\n]*\n[-+|: ]*---[-+|: ]*\r?\n", "a printed table", _AS_CSV),
    (rb"[-+.\d]+ ([^|\n]* )?\|\w*( [^|\n,;]*)(\|\w* [^|\n,;]*)*\n", "Vowpal Wabbit", "write libffm or CSV"),
    (rb"\x80[\x02-\x05]", "a pickle", _AS_PARQUET),
)
_LINES = 3
_EXCEL_BYTES, _RECORD = 4096, 16


class Look(NamedTuple):
    """The format of a file.

    Attributes:
        name: the name of the format.
        mend: the end of an error, which says how to fix the problem.
        form: its ``data.format``; None if girih does not read it.
    """

    name: str
    mend: str
    form: str | None = None


def recognized(head: bytes, compression: str | None = None) -> Look | None:
    """Returns the format of a file. Returns None if its first bytes show no known format.

    Args:
        head: the first bytes, decompressed.
        compression: the compression of the file.
    """
    prefix = f"{compression}-compressed " if compression else ""
    if begins_with(PARQUET, head):
        unpacked = "decompress it, and " if compression else ""
        return Look(f"{prefix}Parquet", unpacked + to_set("parquet"), None if compression else "parquet")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Look(f"{prefix}UTF-16 text", 'set data.encoding = "utf-16"', "csv")
    if head.startswith(b"PK\x03\x04") and b"[Content_Types].xml" in head[:_EXCEL_BYTES]:
        return Look(f"{prefix}an Excel file (xlsx)", _AS_CSV)
    if len(head) > _RECORD and head[4:8] == bytes(4) and head[12] == 0x0A:
        return Look(f"{prefix}TFRecord", _AS_PARQUET)
    if head[257:262] == b"ustar":
        return Look(f"{prefix}a tar archive", _UNPACK)
    for magic, (name, mend) in _BINARY.items():
        if begins_with(magic, head):
            return Look(prefix + name, mend)
    for pattern, name, mend in _TEXTS:
        if re.match(pattern, head.removeprefix(b"\xef\xbb\xbf")):
            return Look(prefix + name, mend)
    lines = head.removeprefix(b"\xef\xbb\xbf").splitlines()
    lines = [line for line in lines if line.strip()]
    lines = lines[:-1][:_LINES] or lines[:1]  # the last line may be cut off
    if not lines or b"\0" in head:
        return None
    if lines[0].lstrip().startswith(b"["):
        whole = lines[0].lstrip().startswith(b"[{") or lines[0].strip() == b"["
        return Look(f"{prefix}a JSON array", "write one object a line (JSON lines)") if whole else None
    if all(map(_SLOTS.fullmatch, lines)):
        mend = "write JSON lines: an object a line, and a list for a name that comes several times"
        return Look(f"{prefix}name:value pairs (slots)", mend)
    form = next((each for each in map(format_of, lines) if each != "csv"), "csv")
    if form == "csv":
        return _delimited(lines, prefix)
    names = {"jsonl": "JSON lines", "criteo": "a log of Criteo", "libsvm": "libsvm", "libffm": "libffm"}
    return Look(prefix + names[form], to_set(form), form)


def begins_with(magic: bytes, head: bytes) -> bool:
    """Returns whether a file has the format of a magic number, and is not text that begins with the same letters."""
    return head.startswith(magic) and (not magic.isascii() or _CONTROL.search(head, 0, _NEAR) is not None)


def format_of(line: bytes) -> str:
    """Returns the ``data.format`` of text that begins with a line."""
    if line.lstrip().startswith(b"{"):
        return "jsonl"
    cells = line.split(b"\t")
    if len(cells) == CRITEO_CELLS and cells[0] in (b"0", b"1"):
        return "criteo"
    line = line.replace(b"\t", b" ")
    return "libsvm" if LIBSVM.fullmatch(line) else "libffm" if LIBFFM.fullmatch(line) else "csv"


def is_object(line: bytes) -> bool:
    """Returns whether a line is a JSON object."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def separator_of(line: str) -> str:
    """Returns the most frequent separator of a line, or a comma if it has none."""
    found = max(SEPARATORS, key=lambda each: (line.count(each), -SEPARATORS.index(each)))
    return found if found in line else ","


def _delimited(lines: list[bytes], prefix: str) -> Look | None:
    texts = [line.decode("utf-8", "replace") for line in lines]
    separator = separator_of(texts[0])
    counts = {text.count(separator) for text in texts if '"' not in text}
    if separator not in texts[0] or len(counts) > 1:
        return None
    if separator == ",":
        return Look(f"{prefix}CSV", to_set("csv"), "csv")
    mend = f"{to_set('csv')}, and separator = {separator!r}"
    return Look(f"{prefix}CSV separated by {separator!r}", mend, "csv")


def to_set(form: str) -> str:
    """Returns the end of an error about a file of another format."""
    return f'set data.format = "{form}" (girih.read_{form}) for train, valid and test; predict and evaluate have --format'

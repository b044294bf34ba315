"""Changes to trees of JSON and to files of tensors, by a random generator; they know nothing of what a file means."""

import copy
import json
import struct

WORDS = [
    "",
    "x",
    "ids",
    "../x",
    "/etc/passwd",
    "~/x",
    "os:system",
    "evil.py:M",
    "\u0000",
    "\u202e",
    "ü",
    "a" * 300,
    "$tensor",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    255,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    1e308,
    -1e308,
    float("nan"),
]
TREES = [None, True, False, [], {}, [[]], [{}], {"x": 1}, {"$tensor": "x"}, {"$items": [1]}]
RAW = {  # written as they are: Python has no such values, or cannot write them
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@deep objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@huge": "9" * 5000,
    "@infinite": "1e400",
    "@surrogate": '"\\ud800"',
    "@levels": "[" * 900 + "]" * 900,
}
DTYPES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "X9": 4,
}
NAN = {
    "F64": struct.pack("<d", float("nan")),
    "F32": struct.pack("<f", float("nan")),
    "BF16": b"\xc1\x7f",
    "F16": b"\x01\x7e",
}
INF = {
    "F64": struct.pack("<d", float("inf")),
    "F32": struct.pack("<f", float("inf")),
    "BF16": b"\x80\x7f",
    "F16": b"\x00\x7c",
}


class Twice(dict):
    """An object with keys that are there twice, as :mod:`json` writes it."""

    def __init__(self, tree, pairs):
        super().__init__(tree)
        self.pairs = pairs

    def items(self):
        return [*super().items(), *self.pairs]


def dump(tree, **options):
    """A tree as text, with what Python cannot write."""
    text = json.dumps(tree, **options)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text


def value(rng, tree):
    """Any value: of another kind, or one from elsewhere in the tree."""
    kind = rng.random()
    if kind < 0.25:
        *way, last = rng.choice(places(tree) or [("",)])
        return copy.deepcopy(at(tree, way)[last]) if last != "" else None
    pool = [*WORDS, *NUMBERS, *TREES] if kind < 0.9 else list(RAW)
    return copy.deepcopy(rng.choice(pool))


def places(tree, path=()):
    """Every place in a tree."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def at(tree, way):
    for key in way:
        tree = tree[key]
    return tree


def change_tree(tree, rng):
    """A tree with one change, and what it was."""
    tree = copy.deepcopy(tree)
    if rng.random() < 0.01 or not places(tree):
        return value(rng, tree), "whole"
    found = places(tree)
    if rng.random() < 0.5:  # each key of the top as often as any other
        top = rng.choice([place for place in found if len(place) == 1])
        found = [place for place in found if place[0] == top[0]]
    *way, last = rng.choice(found)
    node = at(tree, way)
    kind = rng.choice(
        ["delete", "rename", "twice", "add", "swap", "replace", "replace", "replace", "nudge", "nudge"]
    )
    if kind == "delete":
        del node[last]
    elif kind == "rename" and isinstance(node, dict):
        node[str(rng.choice([last + "x", *WORDS]))] = node.pop(last)
    elif kind == "twice" and isinstance(node, dict):
        twice = Twice(node, [(last, rng.choice([node[last], value(rng, tree)]))])
        if not way:
            return twice, "twice"
        at(tree, way[:-1])[way[-1]] = twice
    elif kind == "twice" or (kind == "add" and isinstance(node, list)):
        node.insert(last, rng.choice([copy.deepcopy(node[last]), value(rng, tree)]))
    elif kind == "add" and isinstance(node[last], dict):
        node[last][rng.choice(WORDS)] = value(rng, tree)
    elif kind == "swap":
        *other_way, other = rng.choice(found)
        other_node = at(tree, other_way)
        one, two = copy.deepcopy(node[last]), copy.deepcopy(other_node[other])
        node[last] = two
        if (*other_way[: len(way) + 1],) != (*way, last):  # else the other one is gone
            other_node[other] = one
    elif kind == "nudge" and type(node[last]) in (int, float):
        node[last] = rng.choice(
            [node[last] + 1, node[last] - 1, -node[last], 2 * node[last], float(node[last])]
        )
    elif kind == "nudge" and isinstance(node[last], str):
        node[last] = rng.choice(
            [node[last] + "x", node[last][:-1], node[last].upper(), "../" + node[last], "./" + node[last]]
        )
    elif kind == "nudge" and isinstance(node[last], list) and node[last]:
        items = node[last]
        node[last] = rng.choice([items[:-1], [*items, items[0]], items[::-1], items * 2])
    else:
        node[last] = value(rng, tree)
    return tree, f"{kind} {(*way, last)}"


def split(content):
    """The header of a safetensors file, and the bytes after it."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(text, data, align=8):
    text = text.encode(errors="surrogatepass")
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text + data


def change_tensors(content, rng, align=8):
    """A safetensors file with one change, and what it was. Offsets stay as they are, or all of them are made right again."""
    header, data = split(content)
    names = [name for name in header if name != "__metadata__"]
    kind = rng.choice(
        [
            "tree",
            "girih",
            "girih",
            "girih",
            *["value"] * 4,
            *["rows"] * 3,
            "tensors",
            "declared",
            "cut",
            "start",
        ]
    )
    if kind == "tree":
        changed, what = change_tree(header, rng)
        return joined(dump(changed), data, align), f"header: {what}"
    if kind == "girih" and "girih" in header.get("__metadata__", {}):
        changed, what = change_tree(json.loads(header["__metadata__"]["girih"]), rng)
        header["__metadata__"]["girih"] = dump(changed)
        return joined(json.dumps(header), data, align), f"girih: {what}"
    if kind == "cut":
        size = rng.choice(
            [0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, rng.randrange(len(content) + 1)]
        )
        return content[:size], f"cut to {size}"
    if kind == "start":
        start = struct.pack("<Q", rng.choice([0, 1, 2, 2**31, 2**63, 2**64 - 1, len(content), len(data)]))
        return start + content[8:], "length of the header"
    entries = {name: header[name] for name in names}
    pieces = {
        name: bytearray(data[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in entries.items()
    }
    name = rng.choice([name for name in names if pieces[name]] or names)
    entry, piece = entries[name], pieces[name]
    item = DTYPES.get(entry["dtype"], 1)
    if kind == "declared":
        entry["shape"] = rng.choice(
            [
                [2**62, 4],
                [0, 2**63 - 1],
                [*entry["shape"], 1],
                entry["shape"][::-1],
                [-1],
                [2**40],
                [],
                [1] * 40,
                7,
            ]
        )
        what = f"declared {name}: {entry['shape']}"
        if rng.random() < 0.5:
            entry["data_offsets"] = rng.choice(
                [
                    [0, 0],
                    [0, 8],
                    [8, 0],
                    [2**63, 2**63],
                    [4, len(data)],
                    entries[names[0]]["data_offsets"],
                ]
            )
        if rng.random() < 0.7:
            return joined(json.dumps(header), data, align), what
        piece.clear()  # nothing lies there, and all others lie right
    else:
        what = f"{kind} of {name}"
    if kind in ("value", "girih") and piece:
        place = rng.randrange(len(piece) // item) * item
        others = [bytes(piece[at : at + item]) for at in range(0, len(piece), item)][:1000]
        special = [each[entry["dtype"]] for each in (NAN, INF) if entry["dtype"] in each] * 2
        piece[place : place + item] = rng.choice(
            [*special, bytes(item), b"\xff" * item, rng.randbytes(item), rng.choice(others)]
        )
    elif kind == "rows" and piece and entry["shape"] and entry["shape"][0] > 0:
        count, row = entry["shape"][0], len(piece) // entry["shape"][0]
        one, other = rng.randrange(count), rng.randrange(count)
        change = rng.choice(["copy", "swap", "fewer", "more", "all", "zero"])
        same = [n for n in names if entries[n]["shape"][:1] == [count]] if rng.random() < 0.6 else [name]
        for each in same:  # all columns of a row, or this one alone
            part, size = pieces[each], len(pieces[each]) // count
            first, second = (
                bytes(part[one * size : (one + 1) * size]),
                bytes(part[other * size : (other + 1) * size]),
            )
            if change in ("copy", "swap"):
                part[one * size : (one + 1) * size] = second
            if change == "swap":
                part[other * size : (other + 1) * size] = first
            if change == "all":
                part[:] = first * count
            if change == "zero":
                part[:] = bytes(len(part))
            if change in ("fewer", "more"):
                part[:] = part[: (count - 1) * size] if change == "fewer" else part + first
                entries[each]["shape"] = [
                    count + (1 if change == "more" else -1),
                    *entries[each]["shape"][1:],
                ]
        what = f"{change} {row} bytes of {same}"
    elif kind == "tensors":
        change = rng.choice(["missing", "extra", "rename", "swap", "dtype", "reshape"])
        other = rng.choice(names)
        if change == "missing":
            del entries[name], pieces[name]
        elif change == "extra":
            entries[f"{name}x"], pieces[f"{name}x"] = copy.deepcopy(entry), bytearray(piece)
        elif change == "rename":
            new = rng.choice([f"{name}x", *WORDS])
            entries[new], pieces[new] = entries.pop(name), pieces.pop(name)
        elif change == "swap":
            entries[name], entries[other] = entries[other], entries[name]
            pieces[name], pieces[other] = pieces[other], pieces[name]
        elif change == "dtype":
            entry["dtype"] = rng.choice([d for d, size in DTYPES.items() if size == item])
        else:
            entry["shape"] = [len(piece) // item]
        what = f"{change} {name}"
    header = {"__metadata__": header["__metadata__"]} if "__metadata__" in header else {}
    data, order = bytearray(), sorted(entries, key=lambda n: (-DTYPES.get(entries[n]["dtype"], 1), n))
    for each in order if align == 8 else entries:
        header[each] = {**entries[each], "data_offsets": [len(data), len(data) + len(pieces[each])]}
        data += pieces[each]
    return joined(json.dumps(header), bytes(data), align), what

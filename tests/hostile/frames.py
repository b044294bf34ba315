"""Frames that are wrong in every way that a frame can be: made up, or one that is expected, changed in a few places."""

import json

import numpy as np

from girih.comm.rpc import Frame

NUMBERS = [0, 1, 2, 3, -1, 7, 255, 1 << 16, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)]
DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float16", "float32", "float64"]
TEXTS = [
    None,
    True,
    -1,
    1e308,
    "",
    "a",
    "role/loader/0",
    [],
    ["a"],
    [[]],
    {},
    {"epoch": -1},
    {"epoch": 1, "position": 7},
]


def any_frame(random, samples):
    """A frame, by a ``random.Random``: most are made of a sample."""
    if random.random() < 0.15:
        kind = random.choice([*range(17), 65535])
        fields = [random.choice(NUMBERS) for _ in range(random.randrange(7))]
        return Frame(kind, tuple(fields), tuple(any_array(random) for _ in range(random.randrange(5))))
    sample = random.choice(samples)
    kind, fields, arrays = sample.kind, list(sample.fields), list(sample.arrays)
    for _ in range(random.randint(1, 3)):
        kind = change(random, kind, fields, arrays)
    return Frame(kind, tuple(fields), tuple(arrays))


def change(random, kind, fields, arrays):
    what = random.randrange(8)
    if what == 0:
        return random.choice([*range(17), 65535])
    if what <= 3 and fields:
        fields[random.randrange(len(fields))] = random.choice(NUMBERS)
    elif what == 4:
        _add_or_remove(random, fields, random.choice(NUMBERS))
    elif what == 5:
        _add_or_remove(random, arrays, any_array(random))
    elif arrays:
        at = random.randrange(len(arrays))
        arrays[at] = changed(random, arrays[at])
    return kind


def _add_or_remove(random, items, item):
    if items and random.random() < 0.5:
        del items[random.randrange(len(items))]
    else:
        items.insert(random.randint(0, len(items)), item)


def any_array(random):
    if random.random() < 0.3:
        return np.frombuffer(json.dumps(random.choice(TEXTS)).encode(), np.uint8)
    shape = [random.choice([0, 1, 2, 3, 5, 8]) for _ in range(random.randrange(4))]
    content = random.choice([0, 1, -1, 2, 127, np.nan, np.inf])
    with np.errstate(all="ignore"):
        return np.full(shape, content).astype(random.choice(DTYPES))


def changed(random, array):
    what = random.randrange(6)
    flat = np.array(array).reshape(-1)
    with np.errstate(all="ignore"):
        if what == 0:
            return flat.astype(random.choice(DTYPES))
        if what == 1:
            return flat[: random.randint(0, len(flat))].copy()
        if what == 2:
            return np.concatenate([flat, flat])
        if what == 3:
            return np.array(array)[None] if array.ndim < 3 else flat
        if what == 4 and len(flat):
            number = random.choice([*NUMBERS, float("nan"), float("inf"), 1e38])
            flat[random.randrange(len(flat))] = np.array(number).astype(flat.dtype)
            return flat.reshape(array.shape)
        if array.dtype == np.uint8 and len(flat):  # a text
            flat[random.randrange(len(flat))] = random.randrange(256)
            return flat
        return any_array(random)

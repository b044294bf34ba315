"""Plain twins of kernels: slow, obviously right, one key at a time. Each room keeps a block."""

import numpy as np
import xxhash

# --- sparse ---


def dedup(ids, offsets, size, features, tables):
    """A dictionary of keys in the order in which they are seen."""
    keys, inverse = {}, {}
    counts = []
    for feature, table in zip(features, tables, strict=True):
        for i in range(offsets[feature * size], offsets[(feature + 1) * size]):
            key = (int(table), int(ids[i]))
            if key not in keys:
                keys[key] = len(keys)
                counts.append(0)
            counts[keys[key]] += 1
            inverse[i] = keys[key]
    return list(keys), counts, inverse


def pool(rows, first, inverse, offsets, weights, size, features, modes, dim):
    """float64[size, features, dim]: each bag's sum, mean or sum over √n."""
    out = np.zeros((size, len(features), dim))
    for p, (feature, mode) in enumerate(zip(features, modes, strict=True)):
        for b in range(size):
            bag = range(offsets[feature * size + b], offsets[feature * size + b + 1])
            for i in bag:
                weight = weights[i] if len(weights) else 1.0
                out[b, p] += weight * rows[inverse[i], first : first + dim].astype(float)
            if len(bag):
                out[b, p] /= {0: 1.0, 1: len(bag), 2: len(bag) ** 0.5}[mode]
    return out


def weight_gradients(rows, first, inverse, offsets, gradients, size, features, modes, dim):
    """float64[N]: what each id's weight changes its bag by, times the bag's gradient, which are float[size, features, dim]."""
    out = np.zeros(offsets[-1])
    for p, (feature, mode) in enumerate(zip(features, modes, strict=True)):
        for b in range(size):
            bag = range(offsets[feature * size + b], offsets[feature * size + b + 1])
            for i in bag:
                row = rows[inverse[i], first : first + dim].astype(float)
                out[i] = (row * gradients[b, p]).sum() / {0: 1.0, 1: len(bag), 2: len(bag) ** 0.5}[mode]
    return out


# --- data ---


def xxh64(word):
    """The hash of bytes as an int64."""
    return int(np.array([xxhash.xxh64_intdigest(word)], dtype=np.uint64).view(np.int64)[0])


def id_of_string(word):
    """A canonical decimal's integer; of other bytes, the hash."""
    text = word.decode("latin-1")
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is not None and str(number) == text and -(2**63) <= number < 2**64:
        return number if number < 2**63 else number - 2**64
    return xxh64(word)


def split_string(text, separator):
    """The pieces that are not empty."""
    return [piece for piece in text.split(separator) if piece]


def flatten(bags):
    """Bags side by side, int64[values], and int64[bags + 1] offsets."""
    offsets = np.cumsum([0, *map(len, bags)], dtype=np.int64)
    return np.array([i for bag in bags for i in bag], dtype=np.int64), offsets


def gather_bags(bags, index):
    return [bags[row] for row in index]


def bag_ends(bags, start):
    """Where each bag ends if the first begins at ``start``."""
    return [start + sum(map(len, bags[: b + 1])) for b in range(len(bags))]


def bag_tails(bags, length):
    """The last ``length`` values of each bag."""
    return [bag[-length:] for bag in bags]


def split_pairs(lines):
    """The words of lines of ``label index:value ...``, without comments: [(label, [(index, value)])]."""
    found = []
    for line in lines:
        words = line.split(b"#")[0].split()
        label = words.pop(0) if words and b":" not in words[0] else b""
        pairs = [word.split(b":", 1) for word in words]
        found.append((label, [(int(index), value) for index, value in pairs]))
    return found

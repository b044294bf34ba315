"""Plain twins of kernels: slow, obviously right, one key at a time. Each room keeps a block."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import xxhash

# --- store ---
# One shard as a dictionary. Everything is done one key at a time, in the order in which the docstrings say it.

MASK = (1 << 64) - 1


def mix(x):
    """The finaliser of splitmix64, in Python's own integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def stream(seed, number):
    """The ``number``-th output of splitmix64."""
    return mix(seed + (number + 1) * 0x9E3779B97F4A7C15)


def key_hash(key_id, table):
    return mix(stream(table, 0) ^ mix(key_id))


def shard_of_key(key_id, table, num_shards):
    return ((key_hash(key_id, table) >> 32) * num_shards) >> 32


def uniform01(bits):
    return ((bits >> 12) + 0.5) / 2**52


def initial_value(spec, table, key_id):
    """float32[W] before rounding to 16 bits."""
    columns = []
    for number, segment in enumerate(spec.segments):
        digest = hashlib.blake2b(f"{spec.table_seed(table)}/{segment.name}".encode(), digest_size=8).digest()
        base = mix(key_id + int.from_bytes(digest, "little"))
        rule = spec.tables[table].initializers[number]
        for column in range(segment.dim):
            if rule.name == "normal":
                pair = column - column % 2
                radius = math.sqrt(-2 * math.log(uniform01(stream(base, pair))))
                angle = 2 * math.pi * uniform01(stream(base, pair + 1))
                columns.append(rule.mean + rule.std * radius * (math.sin if column % 2 else math.cos)(angle))
            elif rule.name == "uniform":
                columns.append(rule.low + (rule.high - rule.low) * uniform01(stream(base, column)))
            else:
                columns.append(rule.value if rule.name == "constant" else 0.0)
    return np.array(columns, np.float32)


def nearest_16(values, dtype):
    """float32 → the nearest 16-bit value, as float32; saturating."""
    values = np.asarray(values, np.float32)
    if dtype == "float32":
        return values.copy()
    if dtype == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (rounded << 16).astype(np.uint32).view(np.float32)


def stochastic_16(values, dtype, seed, key_id, step):
    """float32 → one of its two 16-bit neighbours, by 16 random bits a column; finite values in range only."""
    base = mix(mix(key_id + seed) + step)
    out = []
    for column, value in enumerate(np.asarray(values, np.float32)):
        noise = (stream(base, column // 4) >> (16 * (column % 4))) & 0xFFFF
        magnitude = abs(float(value))
        if dtype == "bfloat16":
            spacing = 2.0 ** (math.frexp(magnitude)[1] - 8) if magnitude else 1.0
            draw = noise / 65536
        elif magnitude >= 2**-14:
            spacing = 2.0 ** (math.frexp(magnitude)[1] - 11)
            draw = (noise >> 3) / 8192
        else:
            spacing, draw = 2.0**-24, noise / 65536
        down = math.floor(magnitude / spacing)
        fraction = magnitude / spacing - down
        out.append(math.copysign((down + (fraction + draw >= 1)) * spacing, value))
    return np.array(out, np.float32)


def optimizer_step(options, row, state, grad, step, lr_scale=1.0):
    """Moves ``row`` and the arrays of ``state`` (by name) in place; float32, column by column."""
    f = np.float32
    lr = f(options.lr * lr_scale)
    if options.name != "ftrl":
        grad = grad + f(options.l2) * row
    if options.name != "sgd":
        grad = np.clip(grad, f(-(2**50)), f(2**50))
    if options.name == "sgd":
        if options.momentum:
            state["momentum"][:] = f(options.momentum) * state["momentum"] + grad
            grad = state["momentum"]
        row -= lr * grad
    elif options.name == "adagrad":
        state["sum"] += grad * grad
        row -= lr * grad / (np.sqrt(state["sum"]) + f(options.eps))
    elif options.name == "rowwise_adagrad":
        total = f(0)
        for g in grad:
            total += g * g
        state["sum"] += total / f(len(row))
        row -= lr / (np.sqrt(state["sum"][0]) + f(options.eps)) * grad
    elif options.name == "adam":
        first, second = options.betas
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m[:] = (grad - m) * f(1 - first) + m
        v[:] = (grad * grad - v) * f(1 - second) + v
        size = f(options.lr * lr_scale * math.sqrt(1 - second**step) / (1 - first**step))
        row -= size * (m / (np.sqrt(v) + f(options.eps)))
    else:
        z, n = state["z"], state["n"]
        more = n + grad * grad
        z += f(lr_scale) * grad - (np.sqrt(more) - np.sqrt(n)) / f(options.lr) * row
        n[:] = more
        curvature = (f(options.beta) + np.sqrt(n)) / f(options.lr) + f(options.l2)
        for d in np.flatnonzero(curvature):
            shrunk = -(z[d] - np.sign(z[d]) * f(options.l1)) / curvature[d]
            row[d] = 0 if abs(z[d]) <= f(options.l1) else shrunk


def optimizer_state(options, row):
    """The state of a new row."""
    f = np.float32
    zeros = np.zeros(len(row), f)
    if options.name == "sgd":
        return {"momentum": zeros} if options.momentum else {}
    if options.name == "adagrad":
        return {"sum": zeros + f(options.initial_accumulator_value)}
    if options.name == "rowwise_adagrad":
        return {"sum": np.full(1, options.initial_accumulator_value, f)}
    if options.name == "adam":
        return {"exp_avg": zeros, "exp_avg_sq": zeros.copy()}
    state = {"z": zeros, "n": zeros.copy()}
    ftrl_settle(options, row, state)
    return state


def ftrl_settle(options, row, state):
    """Makes z agree with a row that was set from outside."""
    f = np.float32
    curvature = (f(options.beta) + np.sqrt(state["n"])) / f(options.lr) + f(options.l2)
    state["z"][:] = -row * curvature - np.sign(row) * f(options.l1)


@dataclass
class Row:
    value: np.ndarray
    state: list
    last_used: int
    count: int
    version: int


class DictionaryStore:
    """What ``girih.store.Store`` promises, for one shard."""

    NAMES = ("lookups", "hits", "new", "refused", "full", "evicted", "expired", "updates", "dropped")

    def __init__(self, spec, num_shards=1, clock=None):
        self.spec = spec
        self.clock = clock
        self.num_shards = num_shards
        self.tables = [{} for _ in spec.tables]  # id → Row; the oldest in use first, where the policy asks
        self.seen = [{} for _ in spec.tables]  # cell → count
        self.counts = dict.fromkeys(self.NAMES, 0)
        self.last_step = 0

    def max_rows(self, table):
        bound = getattr(self.spec.tables[table].eviction, "max_rows", None)
        return math.inf if bound is None else -(-bound // self.num_shards)

    def now(self, table, step):
        policy = self.spec.tables[table].eviction
        return int(self.clock()) - 1577836800 if getattr(policy, "seconds", None) else step

    def initial(self, table, key_id):
        return nearest_16(initial_value(self.spec, table, key_id), self.spec.dtype)

    def segments(self):
        start = 0
        for number, segment in enumerate(self.spec.segments):
            yield number, segment, slice(start, start + segment.dim)
            start += segment.dim

    def lookup(self, keys, counts, step):
        self.last_step = max(self.last_step, step)
        for table, spec in enumerate(self.spec.tables):
            if spec.eviction is not None and spec.eviction.name == "ttl":
                age = spec.eviction.steps or spec.eviction.seconds
                for key_id, row in list(self.tables[table].items()):
                    if self.now(table, step) - row.last_used <= age:
                        break
                    del self.tables[table][key_id]
                    self.counts["expired"] += 1
        return self.read(keys, counts, step)

    def read(self, keys, counts, step, forced=False):
        out, used = {}, set()
        for (key_id, table), count in zip(keys, counts, strict=True):
            rows = self.tables[table]
            self.counts["lookups"] += not forced
            if key_id in rows:
                self.counts["hits"] += not forced
                row = rows[key_id]
                row.last_used = max(row.last_used, self.now(table, step))
                row.count += count
                policy = self.spec.tables[table].eviction
                if policy is not None and policy.name in ("lru", "ttl"):
                    rows[key_id] = rows.pop(key_id)
                used.add((key_id, table))
                out[key_id, table] = row.value.copy()
        for (key_id, table), count in zip(keys, counts, strict=True):
            if (key_id, table) in out:
                continue
            out[key_id, table] = self.initial(table, key_id)
            if not forced and not self.admit(key_id, table, count, step):
                self.counts["refused"] += 1
            elif not self.room(table, step, used):
                self.counts["full"] += not forced
            else:
                value = self.initial(table, key_id)
                state = [optimizer_state(s.optimizer, value[columns]) for _, s, columns in self.segments()]
                self.tables[table][key_id] = Row(value, state, self.now(table, step), count, step)
                self.counts["new"] += 1
                used.add((key_id, table))
        return np.array([out[key] for key in keys], np.float32).reshape(len(keys), self.spec.dim)

    def admit(self, key_id, table, count, step):
        rule = self.spec.tables[table].admission
        if rule is None:
            return True
        if rule.name == "probability":
            draw = uniform01(mix(mix(stream(self.spec.table_seed(table), key_id)) ^ mix(step)))
            return draw < 1 - (1 - rule.p) ** count
        blocks = -(-rule.cells // 4096)
        size = -(-rule.cells // blocks)
        hashed = key_hash(key_id, table)
        block = ((hashed >> 32) * blocks) >> 32
        cells = [block * size + ((((mix(hashed) >> (16 * i)) & 0xFFFF) * size) >> 16) for i in range(4)]
        seen = self.seen[table]
        admitted = min(seen.get(cell, 0) for cell in cells) + count >= rule.count
        for cell in cells if not admitted else ():
            seen[cell] = min(255, seen.get(cell, 0) + count)
        return admitted

    def room(self, table, step, used):
        rows, policy = self.tables[table], self.spec.tables[table].eviction
        if len(rows) < self.max_rows(table):
            return True
        if policy.name == "none":
            return False
        if policy.name == "lfu":
            free = [key_id for key_id, row in rows.items() if row.last_used < step]
            leaving = sorted(free, key=lambda k: (rows[k].count, rows[k].last_used))
            leaving = leaving[: max(1, self.max_rows(table) // 16)]
        else:
            oldest = next(iter(rows))
            in_use = (oldest, table) in used
            if getattr(policy, "seconds", None) is None:
                in_use |= rows[oldest].last_used >= step
            leaving = [] if in_use else [oldest]
        for key_id in leaving:
            del rows[key_id]
            self.counts["evicted"] += 1
        return bool(leaving)

    def peek(self, keys):
        found = [self.tables[t][i].value if i in self.tables[t] else self.initial(t, i) for i, t in keys]
        return np.array(found, np.float32).reshape(len(keys), self.spec.dim)

    def apply_gradients(self, keys, grads, step, lr_scale=1.0):
        self.last_step = max(self.last_step, step)
        dropped = 0
        for (key_id, table), grad in zip(keys, grads, strict=True):
            row = self.tables[table].get(key_id)
            if row is None:
                dropped += 1
                continue
            for number, segment, columns in self.segments():
                optimizer_step(
                    segment.optimizer, row.value[columns], row.state[number], grad[columns], step, lr_scale
                )
            if self.spec.dtype != "float32":
                seed = self.spec.table_seed(table)
                row.value[:] = stochastic_16(row.value, self.spec.dtype, seed, key_id, step)
            row.version = max(row.version, step)
            self.counts["updates"] += 1
        self.counts["dropped"] += dropped
        return dropped

    def assign(self, keys, values):
        """Returns the number of keys that found no room."""
        step = self.last_step + 1
        self.read(keys, [1] * len(keys), step, forced=True)
        refused = 0
        for (key_id, table), value in zip(keys, values, strict=True):
            row = self.tables[table].get(key_id)
            if row is None:
                refused += 1
                continue
            row.value[:] = nearest_16(value, self.spec.dtype)
            row.version = max(row.version, step)
            for number, segment, columns in self.segments():
                if segment.optimizer.name == "ftrl":
                    ftrl_settle(segment.optimizer, value[columns], row.state[number])
        return refused

    def evict(self, keys):
        found = [(i, t) for i, t in keys if self.tables[t].pop(i, None) is not None]
        self.counts["evicted"] += len(found)
        return len(found)


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
    if number is not None and str(number) == text and -(2**63) <= number < 2**63:
        return number
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

"""Plain twins of a store's arithmetic: slow, obviously right, one key and one column at a time."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from girih.store import GroupSpec

Floats = NDArray[np.float32]
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """The finaliser of splitmix64, in Python's own integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def stream(seed: int, number: int) -> int:
    """The ``number``-th output of splitmix64."""
    return mix(seed + (number + 1) * 0x9E3779B97F4A7C15)


def key_hash(key_id: int, table: int) -> int:
    """64 bits of a key."""
    return mix(stream(table, 0) ^ mix(key_id))


def shard_of_key(key_id: int, table: int, num_shards: int) -> int:
    """The shard that owns a key."""
    return ((key_hash(key_id, table) >> 32) * num_shards) >> 32


def uniform01(bits: int) -> float:
    """64 bits as a number between 0 and 1, neither included."""
    return ((bits >> 12) + 0.5) / 2**52


def initial_value(spec: GroupSpec, table: int, key_id: int) -> Floats:
    """float32[W] before rounding to 16 bits."""
    columns = []
    for number, segment in enumerate(spec.segments):
        digest = hashlib.blake2b(f"{spec.table_seed(table)}/{segment.name}".encode(), digest_size=8).digest()
        base = mix(key_id + int.from_bytes(digest, "little"))
        rule: Any = spec.tables[table].initializers[number]
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


def nearest_16(values: ArrayLike, dtype: str) -> Floats:
    """float32 → the nearest 16-bit value, as float32; saturating."""
    found: Floats = np.array(values, np.float32)
    if dtype == "float16":
        found = np.clip(found, -65504, 65504).astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return found
    bits = found.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (rounded << 16).astype(np.uint32).view(np.float32)


def stochastic_16(values: ArrayLike, dtype: str, seed: int, key_id: int, step: int) -> Floats:
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


def optimizer_step(
    options: Any, row: Floats, state: dict[str, Floats], grad: Floats, step: int, lr_scale: float = 1.0
) -> None:
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
    elif options.name != "ftrl":
        raise NotImplementedError(f"optimizer_step has no twin of {options.name!r}; write one here")
    else:
        z, n = state["z"], state["n"]
        more = n + grad * grad
        z += f(lr_scale) * grad - (np.sqrt(more) - np.sqrt(n)) / f(options.lr) * row
        n[:] = more
        curvature = (f(options.beta) + np.sqrt(n)) / f(options.lr) + f(options.l2)
        for d in np.flatnonzero(curvature):
            shrunk = -(z[d] - np.sign(z[d]) * f(options.l1)) / curvature[d]
            row[d] = 0 if abs(z[d]) <= f(options.l1) else shrunk


def optimizer_state(options: Any, row: Floats) -> dict[str, Floats]:
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
    if options.name != "ftrl":
        raise NotImplementedError(f"optimizer_state has no twin of {options.name!r}; write one here")
    state = {"z": zeros, "n": zeros.copy()}
    ftrl_settle(options, row, state)
    return state


def ftrl_settle(options: Any, row: Floats, state: dict[str, Floats]) -> None:
    """Makes z agree with a row that was set from outside."""
    f = np.float32
    curvature = (f(options.beta) + np.sqrt(state["n"])) / f(options.lr) + f(options.l2)
    state["z"][:] = -row * curvature - np.sign(row) * f(options.l1)

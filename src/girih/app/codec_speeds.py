"""Measures how fast a machine packs and unpacks activations and gradients: seconds per byte of each codec.

A message is 1 MiB of float32, 256 examples' outputs of a layer of 1,024: larger than what a core keeps to itself, as most are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from girih.comm.codecs import ACTIVATIONS, GRADIENTS, Codec, ErrorFeedback, TopK
from girih.comm.group import TrainerGroup
from girih.kernels.cpu import ahead
from girih.planner.calibration import CodecSpeed

SHAPE = (256, 1024)
_ROUNDS = 30


def measure_codecs(ranks: TrainerGroup) -> Mapping[str, CodecSpeed]:
    """The speeds of all codecs of activations and gradients, by name; the mean over trainers, who measure at once, as they train."""
    ahead.make_ready(ahead.packing_tensors())
    speeds = {}
    for name, codec in {**ACTIVATIONS, **GRADIENTS}.items():
        speed = measure_codec(codec)
        sums = ranks.sum([speed.pack_s_per_byte, speed.unpack_s_per_byte])
        speeds[name] = CodecSpeed(*(each / ranks.size for each in sums))
    return speeds


def measure_codec(codec: Codec, rounds: int = _ROUNDS) -> CodecSpeed:
    """The speed of one codec in this thread; of top-k with error feedback. A time is that of the fastest tenth of rounds."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    stream = ErrorFeedback(codec) if isinstance(codec, TopK) else codec

    def pack() -> object:
        packed = stream.pack(values)
        if isinstance(stream, ErrorFeedback):
            stream.apply()
        return packed

    packed = codec.pack(values)
    unpack = partial(codec.unpack, packed, SHAPE)
    return CodecSpeed(*(_fast_s(work, rounds) / values.nbytes for work in (pack, unpack)))


def _fast_s(work: Callable[[], object], rounds: int) -> float:
    work()
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return sorted(took)[rounds // 10]

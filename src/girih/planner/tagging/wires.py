"""Chooses codecs between trainers and group servers.

The choice includes the time of the codecs (HT §5.3 leaves this open).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from girih.planner.calibration import Calibration
from girih.planner.operators import OperatorGraph
from girih.planner.steps.fold import step_seconds
from girih.planner.tagging.group import FLOAT32, CodecCost, HierarchicalGroup, WireCost
from girih.planner.tagging.tag import EFFORT, How, Tagged, tag

GAIN = 1.02
"""A less precise codec must give this many times the predicted speed of a more precise one."""

CODECS = {
    each.name: each
    for each in (
        FLOAT32,
        CodecCost(name="bfloat16", number_bytes=2),
        CodecCost(name="int8", number_bytes=1, row_bytes=8),
        CodecCost(name="topk", number_bytes=6, share=0.1),
    )
}
"""The cost of each codec of :mod:`girih.comm.codecs.tensors`, by name. The sent bytes are known, and the times are not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The chosen codecs, the tagging for them, and the reason.

    Attributes:
        examples_per_s: predicted speed with each pair, by the names of the codecs of activations and of gradients.
    """

    wire: WireCost
    tagged: Tagged
    why: str
    examples_per_s: dict[tuple[str, str], float]


def codec_of(name: str, calibration: Calibration | None) -> CodecCost:
    """Returns a codec by its name in ``[strategy]``, with its measured speed.

    A codec that was not measured takes no time. "auto" counts as float32.
    """
    codec = FLOAT32 if name == "auto" else CODECS[name]
    speed = None if calibration is None else calibration.codecs.get(codec.name)
    if speed is None:
        return codec
    return replace(codec, encode_s_per_byte=speed.pack_s_per_byte, decode_s_per_byte=speed.unpack_s_per_byte)


def choose_wire(
    graph: OperatorGraph,
    group: HierarchicalGroup,
    *,
    activations: Sequence[CodecCost],
    gradients: Sequence[CodecCost],
    how: How = "refined",
    effort: int = EFFORT,
) -> Chosen:
    """Tags the graph with each pair of codecs. Takes the first pair that no other pair beats by :data:`GAIN`.

    Args:
        activations, gradients: the possible codecs, the lossless one first. A single codec is used without a choice.
        effort: effort of all pairs together, see :func:`~girih.planner.tagging.tag.tag`.

    Raises:
        ConfigError: the net does not fit, see :func:`~girih.planner.tagging.tag.tag`.
    """
    pairs = sorted(
        ((one + other, a, g) for one, a in enumerate(activations) for other, g in enumerate(gradients)),
        key=lambda pair: pair[0],
    )
    candidates = []
    for _, forward, backward in pairs:
        wire = WireCost(activations=forward, gradients=backward)
        tagged = tag(graph, replace(group, wire=wire), how=how, effort=effort // len(pairs))
        candidates.append((wire, tagged, _in_flight(tagged, group)))
    plain, most = candidates[0][2], max(speed for *_, speed in candidates)
    wire, tagged, speed = next(each for each in candidates if each[2] * GAIN >= most)
    named = f"{wire.activations.name} for activations, {wire.gradients.name} for gradients"
    if len(candidates) == 1:
        why = f"{named}: as given"
    elif tagged is candidates[0][1]:
        why = f"{named}: {plain:,.0f} examples/s predicted, at most {most:,.0f} with another codec, which does not pay"
    else:
        why = f"{named}: {speed:,.0f} examples/s predicted, {plain:,.0f} without compression"
    return Chosen(
        wire=wire,
        tagged=tagged,
        why=why,
        examples_per_s={(w.activations.name, w.gradients.name): speed for w, _, speed in candidates},
    )


def _in_flight(tagged: Tagged, group: HierarchicalGroup) -> float:
    """Returns the examples per second of the group, for the steps that its nets have in flight.

    A step waits for its own computation and its own messages, one after the other. At the busiest device, it also waits
    for the trainer's other nets. With few nets, compression pays even if no link is always busy. On a server, a part
    has one thread. On a trainer, a net has its share of the cores. A load refers to all cores of a device.
    """
    trainer, *servers = tagged.loads.values()
    of_group = group.batch_size * group.trainers  # examples in a step of all trainers, one net each
    busiest_s = of_group / tagged.examples_per_s
    cores = group.trainer.cores
    path_s = of_group * trainer.cpu_s * max(1.0, cores / max(1, cores // group.nets))
    for load, server in zip(servers, group.servers, strict=True):
        path_s += group.batch_size * load.cpu_s * max(1.0, server.cores)
    if group.trainer.bytes_per_s:
        path_s += of_group * (trainer.sent_bytes + trainer.received_bytes) / group.trainer.bytes_per_s
    step_s = step_seconds(busiest_s, path_s, group.nets)
    return of_group / step_s if step_s else math.inf

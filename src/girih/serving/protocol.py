"""Messages of the Open Inference Protocol, version 2: requests read, answers written, in JSON and with tensors as bytes behind it.

Shapes: n examples, T labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import DataError, nearest
from girih.serving.signature import LENGTHS, Output, Signature
from girih.serving.tensors import Tensor, from_bytes, from_json, shape_of, to_bytes

JSON_LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON; tensors follow it as bytes."""
EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "girih"
_JSON, _BINARY = "application/json", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that is asked for: its place among the model's, and whether it is sent as bytes."""

    place: int
    binary: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A request for predictions.

    Attributes:
        id: the caller's own, sent back; None where it has none. tensors: by name. outputs: those asked for.
    """

    id: str | None
    tensors: Mapping[str, Tensor]
    outputs: Sequence[Wanted]


@dataclass(frozen=True, slots=True)
class Answer:
    """A body, and its headers."""

    body: bytes
    headers: Mapping[str, str]


def parse(body: bytes, json_length: str | None, outputs: Sequence[Output]) -> Request:
    """Reads a request.

    Args:
        json_length: the header :data:`JSON_LENGTH`; None where all of the body is JSON.
        outputs: those that the model has.

    Raises:
        DataError: no JSON, no tensors, or what they say does not fit together; says where.
    """
    length = len(body) if json_length is None else _length(json_length, len(body))
    try:
        content = json.loads(body[:length])
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is no JSON ({str(error)[:120]}); expected an inference request") from None
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or not inputs:
        raise DataError(
            'the body has no list of inputs; expected {"inputs": [{"name", "shape", "datatype", "data"}, …]}'
        )
    tensors: dict[str, Tensor] = {}
    data, at = memoryview(body), length
    for number, given in enumerate(inputs):
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str):
            raise DataError(f"input {number} has no name; expected one of the model's inputs")
        if name in tensors:
            raise DataError(f"input {name!r} is there twice")
        size = _parameters(given, f"input {name!r}").get("binary_data_size")
        shape, datatype = shape_of(name, given.get("shape")), given.get("datatype")
        if size is None:
            if "data" not in given:
                raise DataError(f"input {name!r} has neither data nor the parameter binary_data_size")
            tensors[name] = from_json(name, datatype, shape, given["data"])
            continue
        if type(size) is not int or not 0 <= size <= len(body) - at:
            raise DataError(
                f"input {name!r}: binary_data_size = {size!r:.40}; expected at most the {len(body) - at:,} bytes that are left"
            )
        tensors[name] = from_bytes(name, datatype, shape, data[at : at + size])
        at += size
    if at != len(body):
        raise DataError(f"{len(body) - at:,} bytes are left behind the inputs; expected none")
    return Request(_id(content), tensors, _wanted(content, outputs))


def answer(
    request: Request, predictions: NDArray[np.float32], outputs: Sequence[Output], name: str, version: str
) -> Answer:
    """The answer to a request: predictions, float32[n, T], those that are asked for.

    Raises:
        DataError: never; ValueError: a prediction that JSON cannot hold, NaN or infinite.
    """
    described, tail = [], []
    for wanted in request.outputs:
        output, values = outputs[wanted.place], predictions[:, wanted.place]
        tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": [len(values)]}
        if wanted.binary:
            tail.append(to_bytes(values))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = values.tolist()
        described.append(tensor)
    content: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": described}
    if request.id is not None:
        content["id"] = request.id
    head = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if not tail:
        return Answer(head, {"Content-Type": _JSON})
    return Answer(b"".join([head, *tail]), {"Content-Type": _BINARY, JSON_LENGTH: str(len(head))})


def metadata(signature: Signature, name: str, version: str) -> dict[str, Any]:
    """The answer to ``GET /v2/models/NAME``."""
    inputs: list[dict[str, Any]] = []
    for each in signature.inputs:
        inputs.append({"name": each.name, "datatype": each.datatype, "shape": [-1]})
        if each.sequence:
            inputs.append({"name": each.name + LENGTHS, "datatype": "INT32", "shape": [-1]})
    outputs = [{"name": each.name, "datatype": each.datatype, "shape": [-1]} for each in signature.outputs]
    return {"name": name, "versions": [version], "platform": PLATFORM, "inputs": inputs, "outputs": outputs}


def _length(given: str, size: int) -> int:
    if not given.isascii() or not given.isdigit() or len(given) > 18 or int(given) > size:
        raise DataError(f"{JSON_LENGTH} = {given[:40]!r}: expected at most the {size:,} bytes of the body")
    return int(given)


def _parameters(given: Any, whose: str) -> Mapping[str, Any]:
    parameters = given.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"{whose}: parameters are no object")
    return parameters


def _id(content: Mapping[str, Any]) -> str | None:
    found = content.get("id")
    if found is not None and not isinstance(found, str):
        raise DataError("id is no string")
    return found


def _wanted(content: Mapping[str, Any], outputs: Sequence[Output]) -> list[Wanted]:
    """The outputs that a request asks for; all where it names none."""
    binary = _flag(_parameters(content, "the request"), "binary_data_output", False, "the request")
    asked = content.get("outputs")
    if not asked:
        return [Wanted(place, binary) for place in range(len(outputs))]
    if not isinstance(asked, list):
        raise DataError("outputs are no list; leave them out to get all")
    places = {output.name: place for place, output in enumerate(outputs)}
    found = []
    for each in asked:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str) or name not in places:
            raise DataError(
                f"output {name!r:.80}: the model has none of that name{nearest(str(name)[:80], places)}"
            )
        whose = f"output {name!r}"
        found.append(Wanted(places[name], _flag(_parameters(each, whose), "binary_data", binary, whose)))
    return found


def _flag(parameters: Mapping[str, Any], name: str, default: bool, whose: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise DataError(f"{whose}: {name} = {value!r:.40}: expected true or false")
    return value

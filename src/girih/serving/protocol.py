"""Messages of the Open Inference Protocol, version 2: reads requests and writes answers, with tensors in JSON or as bytes.

Bytes of tensors follow the JSON.

Shapes: n examples, T labels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import DataError, nearest
from girih.serving.signature import LENGTHS, Output, Signature
from girih.serving.tensors import (
    BYTES,
    INTEGERS,
    RequestTensor,
    from_bytes,
    from_json,
    preview,
    shape_of,
    to_bytes,
)

JSON_LENGTH = "Inference-Header-Content-Length"
"""The header with the size of a body's JSON in bytes. Tensors follow the JSON as bytes."""
EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "girih"
_JSON, _BINARY = "application/json", "application/octet-stream"
_MOST_KNOWN, _LONGEST_KNOWN = 64, 1 << 16
"""Limits of the JSON texts that a parser remembers: their number, and the bytes of each."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A requested output: its place among the model's outputs, and whether it may be sent as bytes."""

    place: int
    binary: bool


class BinaryTensor(NamedTuple):
    """A tensor that is sent as bytes: the place of its first byte after the JSON, and its number of bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class BinaryLayout:
    """The places of tensors in a request whose tensors are all bytes. Requests with the same JSON share a layout."""

    tensors: tuple[BinaryTensor, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for predictions.

    Attributes:
        id: the caller's id, which the answer repeats, or None.
        outputs: the requested outputs.
        layout: the places of tensors in ``data``. None if the JSON holds some tensors.
        data: the bytes after the JSON.
        given: the tensors by name, if they are already made.
    """

    id: str | None
    outputs: Sequence[Wanted]
    layout: BinaryLayout | None
    data: memoryview
    given: Mapping[str, RequestTensor] | None = None

    @property
    def tensors(self) -> Mapping[str, RequestTensor]:
        """The tensors by name.

        Raises:
            DataError: the bytes do not fit their shape and datatype.
        """
        if self.given is not None or self.layout is None:
            return self.given or {}
        return {
            each.name: from_bytes(
                each.name, each.datatype, each.shape, self.data[each.begin : each.begin + each.size]
            )
            for each in self.layout.tensors
        }


class Parser:
    """Reads requests for a model.

    If all tensors are sent as bytes, the parser remembers the JSON and does not parse it again.

    Args:
        outputs: the outputs of the model.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs
        self._known: dict[bytes, tuple[str | None, Sequence[Wanted], BinaryLayout]] = {}

    def parse(self, body: bytes | bytearray, json_length: str | None) -> InferRequest:
        """Reads a request.

        Args:
            json_length: the header :data:`JSON_LENGTH`; None if the whole body is JSON.

        Raises:
            DataError: the body is not JSON, has no tensors, or contradicts itself. The error names the place.
        """
        length = len(body) if json_length is None else _length(json_length, len(body))
        view = memoryview(body)
        head, data = bytes(view[:length]), view[length:]
        known = self._known.get(head)
        if known is not None and known[2].num_bytes == len(data):
            return InferRequest(*known, data)
        found = self._read(head, data)
        if found.layout is not None and length <= _LONGEST_KNOWN:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[head] = found.id, found.outputs, found.layout
        return found

    def _read(self, head: bytes, data: memoryview) -> InferRequest:
        try:
            content = json.loads(head)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the body is not JSON{_place(error)}; expected an inference request") from None
        inputs = content.get("inputs") if isinstance(content, dict) else None
        if not isinstance(inputs, list) or not inputs:
            told = "list of inputs is empty" if inputs == [] else "body has no list of inputs"
            raise DataError(
                f'the {told}; expected {{"inputs": [{{"name", "shape", "datatype", "data"}}, …]}}'
            )
        given: dict[str, RequestTensor] = {}
        placed: list[BinaryTensor] = []
        at = 0
        for number, described in enumerate(inputs):
            name = described.get("name") if isinstance(described, dict) else None
            if not isinstance(name, str):
                raise DataError(f"input {number} has no name; expected one of the model's inputs")
            if name in given:
                raise DataError(f"input {name!r} occurs twice")
            size = _parameters(described, f"input {name!r}").get("binary_data_size")
            shape, datatype = shape_of(name, described.get("shape")), described.get("datatype")
            if size is None:
                if "data" not in described:
                    raise DataError(f"input {name!r} has neither data nor the parameter binary_data_size")
                given[name] = from_json(name, datatype, shape, described["data"])
                continue
            if type(size) is not int or not 0 <= size <= len(data) - at:
                raise DataError(
                    f"input {name!r}: binary_data_size = {preview(size)}; expected at most the {len(data) - at:,} bytes that are left"
                )
            given[name] = from_bytes(name, datatype, shape, data[at : at + size])
            placed.append(BinaryTensor(name, datatype, shape, at, size))
            at += size
        if at != len(data):
            raise DataError(f"{len(data) - at:,} bytes are left after the inputs; expected none")
        layout = BinaryLayout(tuple(placed), at) if len(placed) == len(given) else None
        return InferRequest(_id(content), _wanted(content, self._outputs), layout, data, given)


def answer(
    request: InferRequest,
    predictions: NDArray[np.float32],
    outputs: Sequence[Output],
    name: str,
    version: str,
) -> tuple[bytes, dict[str, str]]:
    """Returns the body and the headers of the answer to a request: the requested predictions, float32[n, T].

    Raises:
        DataError: never; ValueError: JSON cannot hold a prediction that is NaN or infinite.
    """
    described, tail = [], []
    for wanted in request.outputs:
        output, values = outputs[wanted.place], predictions[:, wanted.place]
        tensor: dict[str, object] = {"name": output.name, "datatype": output.datatype, "shape": [len(values)]}
        if wanted.binary:
            tail.append(to_bytes(values))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = values.tolist()
        described.append(tensor)
    content: dict[str, object] = {"model_name": name, "model_version": version, "outputs": described}
    if request.id is not None:
        content["id"] = request.id
    head = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if not tail:
        return head, {"Content-Type": _JSON}
    return b"".join([head, *tail]), {"Content-Type": _BINARY, JSON_LENGTH: str(len(head))}


def metadata(signature: Signature, name: str, version: str) -> dict[str, object]:
    """Returns the answer to ``GET /v2/models/NAME``. ``datatypes`` lists all datatypes that ids may have."""
    inputs: list[dict[str, object]] = []
    for each in signature.inputs:
        described: dict[str, object] = {"name": each.name, "datatype": each.datatype, "shape": [-1]}
        if each.kind == "ids":
            described["parameters"] = {"datatypes": [*INTEGERS, BYTES]}
        inputs.append(described)
        if each.sequence:
            inputs.append({"name": each.name + LENGTHS, "datatype": "INT32", "shape": [-1]})
    outputs = [{"name": each.name, "datatype": each.datatype, "shape": [-1]} for each in signature.outputs]
    return {"name": name, "versions": [version], "platform": PLATFORM, "inputs": inputs, "outputs": outputs}


def _place(error: Exception) -> str:
    """Returns the place at which a body stops being JSON, or the reason."""
    if isinstance(error, json.JSONDecodeError):
        return f" at line {error.lineno}, character {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f": byte {error.start:,} is not text in {error.encoding.upper()}"
    if isinstance(error, RecursionError):
        return ": lists or objects are nested too deeply"
    return f": a number has more than {sys.get_int_max_str_digits():,} digits"


def _length(text: str, size: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) > size:
        raise DataError(f"{JSON_LENGTH} = {text[:40]!r}: expected at most the {size:,} bytes of the body")
    return int(text)


def _parameters(tensor: Mapping[str, object], owner: str) -> Mapping[str, object]:
    parameters = tensor.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"{owner}: parameters is not an object")
    return parameters


def _id(content: Mapping[str, object]) -> str | None:
    found = content.get("id")
    if found is not None and not isinstance(found, str):
        raise DataError("id is not a string")
    return found


def _wanted(content: Mapping[str, object], outputs: Sequence[Output]) -> list[Wanted]:
    """Returns the outputs that a request asks for; all of them by default."""
    binary = _flag(_parameters(content, "the request"), "binary_data_output", False, "the request")
    asked = content.get("outputs")
    if not asked:
        return [Wanted(place, binary) for place in range(len(outputs))]
    if not isinstance(asked, list):
        raise DataError("outputs is not a list; leave it out to get all")
    places = {output.name: place for place, output in enumerate(outputs)}
    found: dict[str, Wanted] = {}
    for number, each in enumerate(asked):
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str):
            raise DataError(f"output {number} has no name; expected one of the model's outputs")
        if name not in places:
            told = name[:80]
            raise DataError(f"output {told!r}: the model has none of that name{nearest(told, places)}")
        whose = f"output {name!r}"
        if name in found:
            raise DataError(f"{whose} occurs twice")
        found[name] = Wanted(places[name], _flag(_parameters(each, whose), "binary_data", binary, whose))
    return list(found.values())


def _flag(parameters: Mapping[str, object], name: str, default: bool, owner: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise DataError(f"{owner}: {name} = {preview(value)}: expected true or false")
    return value

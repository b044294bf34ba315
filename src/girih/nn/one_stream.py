"""The order of what is done with rows on a GPU, where a loop of the user's own changes from stream to stream.

A GPU does what one stream is given in its order. Rows have one history, so that a stream that comes to them goes on behind the one
that had them before; and memory that one stream claimed must outlast what another does with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from girih.errors import ConfigError
from girih.nn.refusals import UNCAPTURED
from girih.store import Store


class OneStream:
    """Has all that is done with some stores be done in turn, on the current stream.

    Attributes:
        device: of their rows.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._states: list[Any] = [store.state for store in stores]
        first = self._states[0] if self._states else None
        self.device: torch.device = getattr(first, "device", torch.device("cpu"))
        self._last: Any = None
        if self.device.type == "cuda":
            self._last = torch.cuda.current_stream(self.device)

    def current(self, others: Iterable[object] = ()) -> contextlib.AbstractContextManager[None]:
        """Has what is done within come behind all that was done within before.

        Args:
            others: have tensors that it uses, besides the stores.

        Raises:
            ConfigError: a CUDA graph is being captured.
        """
        return contextlib.nullcontext() if self._last is None else self._in_turn(others)

    @contextlib.contextmanager
    def _in_turn(self, others: Iterable[object]) -> Iterator[None]:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError(f"a girih.nn module {UNCAPTURED}; leave it out of a CUDA graph")
            self._go_on(torch.cuda.current_stream(), others)
            yield

    def _go_on(self, stream: torch.cuda.Stream, others: Iterable[object]) -> None:
        if stream == self._last:
            return
        stream.wait_stream(self._last)
        for tensor in tensors_in([*self._states, *others], set()):
            if tensor.device == self.device:  # and not in host memory
                tensor.record_stream(stream)
        self._last = stream


def tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in objects of this library, and in lists and dicts, each once; ``seen`` is for the call's own use."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict):
        parts = value.values()
    elif type(value).__module__.startswith("girih."):
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part, seen)

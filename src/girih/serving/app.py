"""The server as an ASGI application: the Open Inference Protocol over HTTP, health and metrics.

One thread of the process answers all requests, one after the other. It computes and never waits. So a single version of
the model answers a whole request.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from girih.errors import DataError, GirihError, UserError
from girih.serving import protocol
from girih.serving.limits import ServeOptions
from girih.serving.metrics import CONTENT_TYPE, ServingMetrics
from girih.serving.model_directory import open_served
from girih.serving.reading import RequestReader, TooLarge
from girih.serving.served import Served
from girih.serving.signature import Signature
from girih.version import __version__

_LOG = logging.getLogger(__name__)
_PATH = "/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_MODEL, INFER = re.compile(_PATH + "(?P<ready>/ready)?"), re.compile(_PATH + "/infer/?")


class NotServed(UserError, LookupError):
    """The server does not have this model or version."""


STATUS: tuple[tuple[type[Exception], int], ...] = (
    (TooLarge, 413),
    (NotServed, 404),
    (UserError, 400),
)
"""Errors, and their HTTP statuses. The first class that fits decides. Other errors have the status 500."""
REFUSED = {"http": 400, "time": 408, "size": 413, "headers": 431, "bytes": 503, "connections": 503}
"""Reasons to refuse a client, and their HTTP statuses."""


class InferenceServer:
    """Answers requests for one model.

    Args:
        name: the model's name for clients.
        served: the version that answers first.
        options: the options of the server. A request above their limits gets the status 413.

    Raises:
        ConfigError: prometheus-client is missing.
    """

    def __init__(self, name: str, signature: Signature, served: Served, options: ServeOptions) -> None:
        self._name, self._signature, self.most_bytes = name, signature, options.max_bytes
        self._metrics = ServingMetrics()
        self._reader = RequestReader(served.schema, options.max_batch)
        self._outputs = signature.outputs
        self._parser = protocol.Parser(self._outputs)
        server = {"name": "girih", "version": __version__, "extensions": list(protocol.EXTENSIONS)}
        self._pages: dict[str, Callable[[], Response]] = {
            "/v2": lambda: JSONResponse(server),
            "/v2/health/live": lambda: JSONResponse({"live": True}),
            "/v2/health/ready": lambda: JSONResponse({"ready": True}),
            "/metrics": lambda: Response(self._metrics.text(), headers={"Content-Type": CONTENT_TYPE}),
        }
        self.replace(served)

    def replace(self, served: Served) -> None:
        """Makes another version answer later requests. Any thread may call it.

        A request in progress keeps its version.
        """
        self._served = served
        self._metrics.serves(served.version)

    def app(self) -> ASGIApp:
        """Returns the ASGI application, for a host that has its own limits on clients."""
        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        return Starlette(routes=[Route("/{path:path}", self._handle, methods=methods)])

    async def _handle(self, request: Request) -> Response:
        path = "/" + request.path_params["path"]
        named = INFER.fullmatch(path) if request.method == "POST" else None
        if named is None:
            return self.describe(request.method, path)
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except UserError as error:
            self._metrics.requests.labels(str(status_of(error))).inc()
            return refusal(error, close=True)
        return self.answer(named["name"], named["version"], request.headers.get(protocol.JSON_LENGTH), body)

    def describe(self, method: str, path: str) -> Response:
        """Returns the answer to a request that does not ask for predictions."""
        path = path.rstrip("/") or "/"
        page, named = self._pages.get(path), _MODEL.fullmatch(path)
        if named is not None:
            page = partial(self._describe_model, **named.groupdict())
        if page is not None and method in ("GET", "HEAD"):
            return page()
        error = f"{method} {path[:80]}: no such path; see /v2 and /v2/models/NAME"
        return JSONResponse({"error": error}, 405 if page is not None or INFER.fullmatch(path) else 404)

    def _describe_model(self, name: str, version: str | None, ready: str | None) -> Response:
        try:
            served = self._find(name, version)
        except GirihError as error:
            return refusal(error)
        if ready:
            return JSONResponse({"name": name, "ready": True})
        return JSONResponse(protocol.metadata(self._signature, name, str(served.version)))

    def refuse(self, reason: str, text: str) -> Response:
        """Returns the answer to a client that exceeded a limit; ``reason`` is a key of :data:`REFUSED`."""
        self._metrics.refused.labels(reason).inc()
        headers = {"Retry-After": "1"} if REFUSED[reason] == 503 else None
        return JSONResponse({"error": text}, REFUSED[reason], headers)

    def answer(
        self, name: str, version: str | None, json_length: str | None, body: bytes | bytearray
    ) -> Response:
        """Returns the answer to a request for predictions.

        Args:
            name, version: the model, from the path. json_length: the header
                :data:`~girih.serving.protocol.JSON_LENGTH`.
        """
        start = time.perf_counter()
        try:
            response = self._predicted(name, version, json_length, body)
        except GirihError as error:
            response = refusal(error)
        except Exception as error:  # a model may raise anything on bad numbers, but the server must go on
            _LOG.exception("a request failed")
            response = refusal(RuntimeError(f"the model failed: {type(error).__name__}: {error}"[:200]))
        self._metrics.seconds.observe(time.perf_counter() - start)
        self._metrics.requests.labels(str(response.status_code)).inc()
        return response

    def _predicted(
        self, name: str, version: str | None, json_length: str | None, body: bytes | bytearray
    ) -> Response:
        served = self._find(name, version)  # the request keeps this version to the end
        asked = self._parser.parse(body, json_length)
        batch = self._reader.read_request(asked)
        predictions = served.predict(batch)
        try:
            content, headers = protocol.answer(asked, predictions, self._outputs, name, str(served.version))
        except ValueError:
            return JSONResponse(
                {
                    "error": "a prediction is NaN or infinite, which JSON cannot hold; ask for it as binary_data"
                },
                500,
            )
        self._metrics.examples.inc(batch.num_examples)
        return Response(content, headers=headers)

    def _find(self, name: str, version: str | None) -> Served:
        """Returns the version that answers.

        Raises:
            NotServed: the path names another model, or another version.
        """
        if name != self._name:
            raise NotServed(f"model {name[:80]!r} is not here; this server has {self._name!r}")
        served = self._served
        if version is not None and version != str(served.version):
            raise NotServed(
                f"version {version[:80]!r} of {name!r} is not here; this server has {served.version}"
            )
        return served

    async def _body(self, request: Request) -> bytes:
        """Returns the body of a request.

        Raises:
            TooLarge: the body has more bytes than the limit; the rest is not read.
            DataError: the body is compressed.
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise self.compressed(request.headers["Content-Encoding"])
        pieces, size = [], 0
        async for piece in request.stream():
            pieces.append(piece)
            size += len(piece)
            if size > self.most_bytes:
                raise self.too_large(size)
        return b"".join(pieces)

    def compressed(self, encoding: str) -> DataError:
        """Returns the error for a request with a compressed body."""
        return DataError(f"Content-Encoding = {encoding[:40]!r}: expected none; send the body uncompressed")

    def too_large(self, size: int) -> TooLarge:
        """Returns the error for a request whose body has too many bytes."""
        return TooLarge(
            f"a body of {size:,} bytes; expected at most {self.most_bytes:,}: send several requests"
        )


def application(directory: Path, name: str | None = None) -> ASGIApp:
    """Returns the ASGI application of an exported model, for a host of ASGI applications: see ``deploy/``.

    Args:
        name: the model's name for clients; by default the export's name.

    Raises:
        MissingFileError, CheckpointError: there is no exported model, or it is damaged.
    """
    signature, served = open_served(directory)
    return InferenceServer(name or signature.name, signature, served, ServeOptions()).app()


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def refusal(error: Exception, *, close: bool = False) -> Response:
    """Returns an answer that reports an error in one sentence.

    ``close`` ends the connection. This is necessary if the body was not read.
    """
    headers = {"Connection": "close"} if close else None
    return JSONResponse({"error": " ".join(str(error).split())}, status_of(error), headers=headers)

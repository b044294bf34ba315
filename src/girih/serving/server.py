"""A server as processes: one that answers itself, or several workers that share its port, and one that looks after them.

Workers are started anew as processes of their own, with the socket handed over: they all wait for connections at the same one.
They end when the pipe that they were given is closed, so that none outlives who looks after it. A worker is
``python -m girih.serving.server DESCRIPTOR``.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from girih.dense.accel import process_settings
from girih.errors import ConfigError, GirihError, RoleError
from girih.kernels.cpu import ahead
from girih.serving.children import AGAIN_S, release_input, start_process
from girih.serving.limits import DRAIN_S, Notify, ServeOptions, allow_files
from girih.serving.metrics import SHARED
from girih.serving.signature import check_all, check_name

READY = "ready"
_LOOK_EVERY_S = 0.2
_SWITCH_S = 0.0005
"""A thread that wants to run waits for another one so long; Python has ten times that."""
_SHORT_LIFE_S = 10.0
_MOST_SHORT_LIVES = 3


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket with the address of a server, which does not listen yet: who connects before the model is there is refused.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(
            f"--host {host}: {error.strerror or error}; expected an address of this machine"
        ) from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # connections have it from here: asyncio does not know that they are TCP's, and an answer would wait 40 ms for its own head to be acknowledged
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(host, port) from None
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(
            f"--host {host} --port {port}: {reason}; expected an address of this machine"
        ) from None
    return listening


def address_of(listening: socket.socket) -> str:
    """``http://HOST:PORT``."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    directory: Path, name: str, options: ServeOptions, ready: Notify, notify: Notify, *, follow: bool = False
) -> None:
    """Answers until a signal comes.

    Args:
        directory: of an exported model. name: of the model, for clients.
        ready: receives a line once it answers. notify: receives a line on every other event.
        follow: whether the directory is that of a follower, whose newest version answers.

    Raises:
        ConfigError: the address cannot be had, the name has a slash, or a package is missing. KeyboardInterrupt: the signal.
    """
    check_name(name)
    require_packages()
    allow_files(options.max_connections)
    with bind_socket(options.host, options.port) as listening:
        about = f"{name} at {address_of(listening)}"
        if options.workers == 1:
            answer(directory, name, options, listening, lambda: ready(about), follow=follow)
        else:
            with Workers(directory, name, options, listening, notify, follow=follow) as workers:
                ready(f"{about}, {options.workers} workers")
                workers.watch()


def answer(
    directory: Path,
    name: str,
    options: ServeOptions,
    listening: socket.socket,
    ready: Callable[[], None],
    *,
    verify: bool = True,
    follow: bool = False,
) -> None:
    """Answers in this process; its numbers of threads are set.

    Args:
        ready: called when it begins to. verify: whether checksums are compared first. follow: see :func:`serve`.
    """
    import torch
    import uvicorn

    from girih.serving.app import InferenceServer
    from girih.serving.direct import direct
    from girih.serving.served import ServedModel, open_served
    from girih.serving.watching import Watched, watching

    torch.set_num_threads(options.threads)
    watched = Watched(directory, options.model) if follow else None
    model = (
        ServedModel(name, *open_served(directory, verify=verify)) if watched is None else watched.model(name)
    )
    server = InferenceServer(model, most_examples=options.max_batch, most_bytes=options.max_bytes)
    config = uvicorn.Config(
        server.app(),
        http=direct(server, options),  # type: ignore[arg-type]
        proxy_headers=False,  # nobody looks at who asks
        log_level="error",  # strangers who speak no HTTP get status 400, and no line
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        ws="none",
    )

    class Answering(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    # a version that is being opened lets a request go first; and what is here by now, the collector need not look through again
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()
    host, port = listening.getsockname()[:2]
    looking = contextlib.nullcontext() if watched is None else watching(watched, server.replace)
    try:
        with looking:
            Answering(config).run(sockets=[listening])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # bound by somebody else too, who listened first
            raise _port_in_use(host, port) from None
        raise


def require_packages() -> None:
    """Refuses to serve without the packages that do it.

    Raises:
        ConfigError: names the one that is missing.
    """
    try:
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve: {error.name} is not installed; pip install 'girih[serve]'") from None


@dataclass
class _Worker:
    """A process that answers. It says on its output that it is ready, and ends when its input does.

    Attributes:
        again_s: when to try again to start another in its place; 0 where nobody has yet.
    """

    process: subprocess.Popen[str]
    begun_s: float
    again_s: float = 0.0


class Workers(contextlib.AbstractContextManager["Workers"]):
    """Processes that answer at one socket; all of them do when this is entered.

    Raises:
        ConfigError: one of them could not begin.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        options: ServeOptions,
        listening: socket.socket,
        notify: Notify,
        *,
        follow: bool = False,
    ) -> None:
        if not follow:  # a follower has checked what it has
            check_all(directory)  # once for all workers
        ahead.make_ready(ahead.serving(), notify)
        order = {"directory": str(directory), "name": name, "options": asdict(options), "follow": follow}
        self._instructions = json.dumps(order)
        self._listening, self._notify = listening, notify
        self._shared = tempfile.TemporaryDirectory(prefix="girih-serve-")
        self._workers: list[_Worker] = []
        self._short_lives = 0
        try:
            self._workers += [self._start_worker() for _ in range(options.workers)]
            for worker in self._workers:
                self._wait_until_ready(worker)
        except BaseException:
            self.close()
            raise

    def watch(self) -> None:
        """Starts those anew that end; returns never.

        Raises:
            RoleError: they end again and again.
        """
        while True:
            time.sleep(_LOOK_EVERY_S)
            for number, worker in enumerate(self._workers):
                status = worker.process.poll()
                if status is None or time.monotonic() < worker.again_s:
                    continue
                if not worker.again_s:
                    self._count_end(worker, status)
                try:
                    self._workers[number] = self._start_worker()
                except OSError as error:
                    if not worker.again_s:
                        self._notify(
                            f"worker {worker.process.pid} ended with status {status}; cannot start another: {error}; tries again"
                        )
                    worker.again_s = time.monotonic() + AGAIN_S
                    continue
                release_input(worker.process)
                self._notify(f"worker {worker.process.pid} ended with status {status}; started another")

    def _count_end(self, worker: _Worker, status: int) -> None:
        from prometheus_client import multiprocess

        short = time.monotonic() - worker.begun_s < _SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if short else 0
        if self._short_lives >= _MOST_SHORT_LIVES:
            raise RoleError(f"serve: workers end as soon as they begin, the last one with status {status}")
        multiprocess.mark_process_dead(worker.process.pid, self._shared.name)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends all workers; those that do not end in time are killed."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + DRAIN_S + 1
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.wait()
            release_input(worker.process)
        self._workers.clear()
        self._shared.cleanup()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_worker(self) -> _Worker:
        descriptor = self._listening.fileno()
        process = start_process(
            "girih.serving.server",
            str(descriptor),
            instructions=self._instructions,
            environment={**os.environ, SHARED: self._shared.name},
            descriptors=(descriptor,),
        )
        return _Worker(process, time.monotonic())

    def _wait_until_ready(self, worker: _Worker) -> None:
        if (worker.process.stdout.readline().strip()) != READY:  # type: ignore[union-attr]
            status = worker.process.wait()
            raise ConfigError(f"serve: a worker could not begin (status {status}); see its message above")


def worker(descriptor: int, pipe: IO[str]) -> None:
    """A worker's work.

    Args:
        descriptor: of the socket. pipe: the pipe that begins with what to serve; its end means that this process is to end.
    """
    instructions: dict[str, Any] = json.loads(pipe.readline())
    options = ServeOptions(**instructions["options"])
    with socket.socket(fileno=descriptor) as listening:
        threading.Thread(target=_end_when_closed, args=(pipe,), name="girih-parent", daemon=True).start()

        def ready() -> None:
            print(READY, flush=True)

        directory, follow = Path(instructions["directory"]), instructions["follow"]
        answer(directory, instructions["name"], options, listening, ready, verify=False, follow=follow)


def _end_when_closed(pipe: IO[str]) -> None:
    pipe.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _port_in_use(host: str, port: int) -> ConfigError:
    return ConfigError(f"--port {port}: {host}:{port} is taken; name another, or 0 for any that is free")


def main() -> int:
    """Answers until it is told to end; returns the status of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    process_settings.defer_dynamo()
    try:
        worker(int(sys.argv[1]), sys.stdin)
    except KeyboardInterrupt:
        return 0
    except GirihError as error:
        print(f"girih: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    status = main()
    gc.freeze()  # see girih.cli.main
    sys.exit(status)

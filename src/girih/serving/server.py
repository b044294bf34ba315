"""The processes of a server. Either one process answers, or several workers share its port under a supervisor.

Workers inherit the socket, and all of them accept connections from it. A worker ends when its pipe is closed, so no
worker outlives its supervisor. The command of a worker is ``python -m girih.serving.server DESCRIPTOR``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from girih.dense.accel import process_settings
from girih.errors import ConfigError, GirihError, RoleError
from girih.kernels.cpu import ahead
from girih.serving.children import READY, ChildProcess, end_with_parent
from girih.serving.limits import DRAIN_S, Clients, Notify, ServeOptions, allow_files
from girih.serving.metrics import SHARED
from girih.serving.signature import check_all, check_name

_BACKLOG = 2048
_LOOK_EVERY_S = 0.2
_SWITCH_S = 0.0005
"""The time that a thread waits for another one; Python's default is ten times longer."""
_SHORT_LIFE_S = 10.0
_MOST_SHORT_LIVES = 3


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket with the server's address that does not listen yet.

    Clients are refused until the model is loaded and the socket listens.

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
    # Connections inherit this option. asyncio does not set it, because it does not recognize them as TCP. Without it,
    # an answer waits 40 ms until its headers are acknowledged.
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
    """Returns the address as ``http://HOST:PORT``."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    directory: Path, name: str, options: ServeOptions, ready: Notify, notify: Notify, *, follow: bool = False
) -> None:
    """Answers until a signal arrives.

    Args:
        directory: the exported model.
        name: the model's name for clients.
        ready: receives a line when the server can answer.
        notify: receives a line for every other event.
        follow: True if the directory belongs to a follower. Then its newest version answers.

    Raises:
        ConfigError: the address is not available, the name has a slash, or a package is missing.
        KeyboardInterrupt: a signal arrived.
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
    """Answers requests in this process, with the configured number of threads.

    Args:
        ready: called when the process can answer.
        verify: if True, compares checksums first.
        follow: see :func:`serve`.
    """
    import torch

    from girih.serving.app import InferenceServer
    from girih.serving.direct import ClientConnection
    from girih.serving.model_directory import ModelDirectory, watching

    torch.set_num_threads(options.threads)
    opened = ModelDirectory(directory, options.model if follow else None, verify=verify and not follow)
    server = InferenceServer(name, opened.signature, opened.served, options)
    clients = Clients(options)

    async def listen() -> None:
        """Answers until a signal arrives, then finishes the requests in progress."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ending.set)
        accepting = await loop.create_server(
            lambda: ClientConnection(server, clients), sock=listening, backlog=_BACKLOG
        )
        ready()
        await ending.wait()
        loop.remove_signal_handler(signal.SIGINT)  # a second signal ends the process at once
        accepting.close()
        await clients.end()

    # opening a version yields to requests soon, and the garbage collector skips the objects that exist now
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()
    host, port = listening.getsockname()[:2]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with watching(opened, server.replace) if follow else contextlib.nullcontext():
            try:
                asyncio.run(listen())
            finally:  # the event loop has replaced the handlers
                for number, handler in handlers.items():
                    signal.signal(number, handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another process bound the port too, and listened first
            raise _port_in_use(host, port) from None
        raise
    raise KeyboardInterrupt


def require_packages() -> None:
    """Checks that the packages for serving are installed.

    Raises:
        ConfigError: a package is missing; names it.
    """
    try:
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve: {error.name} is not installed; pip install 'girih[serve]'") from None


class Workers(contextlib.AbstractContextManager["Workers"]):
    """Processes that answer at one socket. On entry all of them answer.

    Raises:
        ConfigError: a worker could not begin.
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
        if not follow:  # a follower has already checked its files
            check_all(directory)  # once for all workers
        ahead.make_ready(ahead.serving(), notify)
        order = {"directory": str(directory), "name": name, "options": asdict(options), "follow": follow}
        self._shared = tempfile.TemporaryDirectory(prefix="girih-serve-")
        self._workers: list[ChildProcess] = []
        self._short_lives = 0
        descriptor = listening.fileno()
        try:
            for _ in range(options.workers):
                worker = ChildProcess(
                    "worker {pid}",
                    ["girih.serving.server", str(descriptor)],
                    json.dumps(order),
                    notify,
                    environment={**os.environ, SHARED: self._shared.name},
                    descriptors=(descriptor,),
                )
                self._workers.append(worker)
            for worker in self._workers:
                try:
                    worker.wait_until_ready()
                except RoleError:
                    status = worker.process.returncode
                    raise ConfigError(
                        f"serve: a worker could not begin (status {status}); see its message above"
                    ) from None
        except BaseException:
            self.close()
            raise

    def watch(self) -> None:
        """Restarts workers that end. Never returns.

        Raises:
            RoleError: workers end again and again.
        """
        while True:
            time.sleep(_LOOK_EVERY_S)
            for worker in self._workers:
                begun_s, ended = worker.begun_s, worker.look()
                if ended is not None:
                    self._count_end(ended.pid, ended.returncode, time.monotonic() - begun_s)

    def _count_end(self, pid: int, status: int, life_s: float) -> None:
        from prometheus_client import multiprocess

        self._short_lives = self._short_lives + 1 if life_s < _SHORT_LIFE_S else 0
        if self._short_lives >= _MOST_SHORT_LIVES:
            raise RoleError(f"serve: workers end as soon as they begin, the last one with status {status}")
        multiprocess.mark_process_dead(pid, self._shared.name)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends all workers, and kills those that do not end in time."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + DRAIN_S + 1
        for worker in self._workers:
            worker.close(deadline)
        self._workers.clear()
        self._shared.cleanup()

    def __exit__(self, *error: object) -> None:
        self.close()


def worker(descriptor: int, pipe: IO[str]) -> None:
    """Runs a worker.

    Args:
        descriptor: the descriptor of the socket.
        pipe: first has the instructions. When the pipe ends, this process must end.
    """
    instructions: dict[str, Any] = json.loads(pipe.readline())
    options = ServeOptions(**instructions["options"])
    with socket.socket(fileno=descriptor) as listening:
        end_with_parent(pipe)

        def ready() -> None:
            print(READY, flush=True)

        directory, follow = Path(instructions["directory"]), instructions["follow"]
        answer(directory, instructions["name"], options, listening, ready, verify=False, follow=follow)


def _port_in_use(host: str, port: int) -> ConfigError:
    return ConfigError(f"--port {port}: {host}:{port} is taken; name another, or 0 for any that is free")


def main() -> int:
    """Answers until it must end. Returns the status of the process."""
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

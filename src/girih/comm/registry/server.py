"""The side of a registry that other processes ask."""

from __future__ import annotations

import socket
import threading

from girih.comm.registry.entries import LocalRegistry
from girih.comm.transports.addresses import TCP, parse_address
from girih.comm.transports.tls import check_installed
from girih.errors import WireError


class RegistryServer:
    """Offers a registry to the processes of the run until it is closed.

    It listens at once, and loads what answers, numpy with it, in a thread: a launcher starts processes meanwhile.

    Args:
        bind: the host it listens at.
        encrypt: whether TLS goes over its connections.

    Attributes:
        address: ``tcp://HOST:PORT``, or ``tls://HOST:PORT``, for :class:`girih.comm.registry.remote.RemoteRegistry`.
    """

    def __init__(
        self, registry: LocalRegistry, secret: bytes, bind: str = "127.0.0.1", *, encrypt: bool = False
    ) -> None:
        self.registry = registry
        if encrypt:
            check_installed()
        try:
            listener, self.address = TCP(bind, 0, encrypt).listen()
        except WireError as error:
            raise WireError(f"{error}; set cluster.bind to an address of this host") from error
        self._end = listener.close
        self._opening = threading.Thread(target=self._open, args=(secret, listener), daemon=True)
        self._opening.start()

    def close(self) -> None:
        """Ends all connections; whoever waits gets ``WireError``."""
        self.registry.close()
        self._opening.join()
        self._end()

    def _open(self, secret: bytes, listener: socket.socket) -> None:
        from girih.comm.registry.remote import serve
        from girih.comm.transports.sockets import SocketListener

        endpoint = parse_address(self.address)
        self._server = serve(self.registry, secret, SocketListener(endpoint, listener, self.address))
        self._end = self._server.close

"""Bare connections to a server, and what a third one hears and changes between two others."""

import contextlib
import socket
import threading


def dial(server):
    host, port = server.address.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ended(connection):
    connection.settimeout(10)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


class Listening:
    """Between clients and a server: passes all on, and keeps it.

    Args:
        spoil: the number of the client's byte that is changed on its way, over all connections; None: none is.

    Attributes:
        heard: what clients said, and the server.
    """

    def __init__(self, server, *, scheme="tcp", spoil=None):
        self._spoil = spoil
        self.heard = (bytearray(), bytearray())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = server
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with self._listener, contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, dial(self._server) as server:
                    other = threading.Thread(target=self._pass, args=(server, client, self.heard[1]))
                    other.start()
                    self._pass(client, server, self.heard[0])
                    other.join()

    def _pass(self, here, there, said):
        with contextlib.suppress(OSError):
            while data := bytearray(here.recv(1 << 16)):
                start = len(said)
                said += data
                if said is self.heard[0] and self._spoil is not None and start <= self._spoil < len(said):
                    data[self._spoil - start] ^= 1
                there.sendall(data)
        for each in (here, there):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def join(self):
        """Ends it, once the connection that it has is over."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()

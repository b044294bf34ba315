"""TLS 1.3 between processes of a run. Both sides derive the same key from the run's secret.

So no key is sent over the network. Only a process with the secret has the key and is trusted. The certificate is
self-signed and never expires. No other certificate is trusted. Inside TLS, both sides prove that they know the secret,
as on any other connection.
"""

from __future__ import annotations

import datetime
import functools
import hmac
import importlib.util
import secrets
import socket
import ssl
import tempfile
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from girih.errors import ConfigError, WireError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_NAME: Final = "girih"
_BEGIN: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_RECORD_BYTES: Final = 1 << 14  # the most bytes of a TLS record


def check_installed() -> None:
    """Raises an error if this process cannot create certificates.

    Raises:
        ConfigError: the package ``cryptography`` is missing.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            'cluster.encrypt = true: the package "cryptography", which makes certificates, is not installed;'
            " run pip install 'girih[encrypt]' on each host"
        )


class SecureSocket:
    """A TLS socket with the methods that streams need. Any thread may use it: a lock guards its state.

    Args:
        connection: a connected socket, which this object owns from now on.

    Raises:
        WireError: the socket is not connected any more.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, server: bool) -> None:
        context = _context(secret, server)
        try:
            self._socket = context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:
            connection.close()
            raise WireError(f"the connection broke before the TLS handshake: {error}") from error
        self._lock = threading.Lock()  # OpenSSL works without the interpreter's lock
        self.fileno, self.close = self._socket.fileno, self._socket.close
        self.setblocking, self.settimeout = self._socket.setblocking, self._socket.settimeout

    def shake(self) -> bool:
        """Continues the handshake. Returns whether it is done. A blocking socket completes it in one call.

        Raises:
            OSError: the other side has no key of this run, or does not speak TLS.
        """
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def recv(self, num_bytes: int) -> bytes:
        """Receives as a socket does."""
        into = bytearray(num_bytes)
        return bytes(into[: self.recv_into(into)])

    def recv_into(self, into: bytearray | memoryview) -> int:
        """Receives as a socket does.

        Raises:
            BlockingIOError: neither the system nor TLS has received data.
        """
        try:
            with self._lock:
                return self._socket.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | memoryview) -> int:
        """Sends as a socket does. A caller that could not send must send the same data again.

        Raises:
            BlockingIOError: the system accepts no more data now.
        """
        try:
            with self._lock:
                return self._socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendall(self, data: bytes) -> None:
        """Sends as a socket does."""
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Sends as a socket does. Joins small parts, because each TLS record has an overhead."""
        first, num_bytes = [], 0
        for view in views:
            if num_bytes + len(view) > _RECORD_BYTES:
                break
            first.append(view)
            num_bytes += len(view)
        return self.send(b"".join(first) if len(first) > 1 else views[0])

    def shutdown(self, how: int) -> None:
        """Shuts down the underlying connection. Callable from any thread."""
        socket.socket.shutdown(self._socket, how)


@functools.lru_cache(8)
def _context(secret: bytes, server: bool) -> ssl.SSLContext:
    """Returns the settings of one side: TLS 1.3 with the run's certificate. The other side must have it too."""
    certificate, key = _certificate(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # all hosts share one certificate, without host names
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if server:
        context.num_tickets = 0  # clients never resume a TLS session
    password = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile() as file:  # the standard library reads keys only from files
        file.write(_encrypted(key, password) + certificate)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return context


def _certificate(secret: bytes) -> tuple[bytes, Ed25519PrivateKey]:
    """Returns the run's certificate in PEM, and its private key. Both are the same in each process."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"girih tls key", "sha256"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return made.public_bytes(Encoding.PEM), key


def _encrypted(key: Ed25519PrivateKey, password: str) -> bytes:
    """Returns the key in PEM, encrypted with a password that only this process knows."""
    from cryptography.hazmat.primitives import serialization

    return bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        )
    )

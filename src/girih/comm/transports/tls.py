"""TLS 1.3 between processes of a run, on both sides with one key, which each of them makes of the run's secret.

So no key travels: who has the secret has the key, and nobody else is believed to be the other end. The certificate is signed by
itself, never expires, and is the only one that is trusted. Inside, both sides prove the secret as on any other connection.
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
_RECORD_BYTES: Final = 1 << 14  # the most that TLS encrypts at once


def check_installed() -> None:
    """Raises where no certificate can be made.

    Raises:
        ConfigError: the package ``cryptography`` is missing.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            'cluster.encrypt = true: the package "cryptography", which makes certificates, is not installed;'
            " run pip install 'girih[encrypt]' on each host"
        )


class SecureSocket:
    """A socket over which TLS goes, with what streams need of a socket. Any thread may use it: a lock guards its state.

    Args:
        connection: a connected socket, from here on this one's.

    Raises:
        WireError: it is not connected any more.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, server: bool) -> None:
        context = _context(secret, server)
        try:
            self._socket = context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:
            connection.close()
            raise WireError(f"the connection broke before a word: {error}") from error
        self._lock = threading.Lock()  # the interpreter's is open while OpenSSL works
        self.fileno, self.close = self._socket.fileno, self._socket.close
        self.setblocking, self.settimeout = self._socket.setblocking, self._socket.settimeout

    def shake(self) -> bool:
        """Goes on with the handshake; whether it is done. A socket that blocks does all of it.

        Raises:
            OSError: the other side has no key of this run, or speaks no TLS.
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
            BlockingIOError: nothing is there, in the system or here.
        """
        try:
            with self._lock:
                return self._socket.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | memoryview) -> int:
        """Sends as a socket does; who could not send sends the same again.

        Raises:
            BlockingIOError: the system takes no more now.
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
        """Sends as a socket does: small parts together, since each is encrypted with what belongs to a record."""
        first, num_bytes = [], 0
        for view in views:
            if num_bytes + len(view) > _RECORD_BYTES:
                break
            first.append(view)
            num_bytes += len(view)
        return self.send(b"".join(first) if len(first) > 1 else views[0])

    def shutdown(self, how: int) -> None:
        """Ends the connection below, for any thread."""
        socket.socket.shutdown(self._socket, how)


@functools.lru_cache(8)
def _context(secret: bytes, server: bool) -> ssl.SSLContext:
    """Settings of both sides: TLS 1.3, with this run's certificate, and with nobody who shows another."""
    certificate, key = _certificate(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # hosts have no names here: there is one certificate
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if server:
        context.num_tickets = 0  # nobody comes back with one
    password = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile() as file:  # the standard library reads keys from files alone
        file.write(_encrypted(key, password) + certificate)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return context


def _certificate(secret: bytes) -> tuple[bytes, Ed25519PrivateKey]:
    """The run's certificate in PEM, the same in each process, and its private key."""
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
    """The key in PEM, under a password that this process alone has."""
    from cryptography.hazmat.primitives import serialization

    return bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        )
    )

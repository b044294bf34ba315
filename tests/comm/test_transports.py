"""All transports under one suite."""

from support import inproc
from support.transports import TransportSuite


class TestTCP(TransportSuite):
    address = "tcp://127.0.0.1:*"


class TestTLS(TransportSuite):
    address = "tls://127.0.0.1:*"


class TestShared(TransportSuite):
    address = "shm://"


class TestInproc(TransportSuite):
    address = "inproc://*"
    dialer = inproc.Dialer
    listen = staticmethod(inproc.listen)
    connect = staticmethod(inproc.connect)

"""Frames, codecs and transports between processes: calls that happen exactly once."""

from girih.comm.rpc.client import Client
from girih.comm.rpc.endpoints import abort_clients, connect, listen
from girih.comm.rpc.frames import Frame, Limits
from girih.comm.rpc.reply import Reply
from girih.comm.rpc.server import Request, Server
from girih.testing.faults import Faults

__all__ = [
    "Client",
    "Faults",
    "Frame",
    "Limits",
    "Reply",
    "Request",
    "Server",
    "abort_clients",
    "connect",
    "listen",
]

"""Frames, codecs and transports between processes: calls that happen exactly once."""

from girih.wire.client import Client
from girih.wire.endpoints import connect, listen
from girih.wire.faulty import Faults
from girih.wire.frames import Frame, Limits
from girih.wire.pending import Reply
from girih.wire.server import Request, Server

__all__ = ["Client", "Faults", "Frame", "Limits", "Reply", "Request", "Server", "connect", "listen"]

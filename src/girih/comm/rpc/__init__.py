"""Calls between processes that are executed exactly once."""

from girih.comm.rpc.client import Client, Reply
from girih.comm.rpc.frames import Frame
from girih.comm.rpc.server import Request, Server

__all__ = ["Client", "Frame", "Reply", "Request", "Server"]

"""Calls between processes that happen exactly once."""

from girih.comm.rpc.client import Client
from girih.comm.rpc.frames import Frame
from girih.comm.rpc.reply import Reply
from girih.comm.rpc.request import Request
from girih.comm.rpc.server import Server

__all__ = ["Client", "Frame", "Reply", "Request", "Server"]

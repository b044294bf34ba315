"""A file for S3, sent in parts as they fill, in any order: nothing of it is ever on a disk of this machine.

    columns are written side by side        ids ────►      values ────────►     state ─────►
    parts, in memory until they are full    [ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ] …   full: sent by a thread

Memory: a part for each column, and those that are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from io import BytesIO
from threading import Semaphore
from typing import Any

from fsspec import AbstractFileSystem

from girih.errors import GirihError

PART_BYTES = 16 << 20
_MOST_PARTS = 10_000  # of S3, which takes no part below 5 MiB but the last
_AT_ONCE = 4

Reaching = Callable[[], AbstractContextManager[Any]]


class PartsUpload:
    """A :class:`girih.store.Sink` for an object; there, whole, once it is finished.

    Args:
        files: s3fs's file system. path: of the object in it.
        reaching: a context in which errors of the store become errors of a line.
        part_bytes: size of a part, unless the object would have too many.
    """

    def __init__(
        self, files: AbstractFileSystem, path: str, reaching: Reaching, part_bytes: int = PART_BYTES
    ) -> None:
        self._files, self._reaching, self._part_bytes = files, reaching, part_bytes
        bucket, key, _ = files.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._parts: dict[int, tuple[bytearray, int]] = {}  # number from 0 → its bytes, and how many lack
        self._sent: dict[int, Future[str]] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, "girih-upload")
        self._room = Semaphore(2 * _AT_ONCE)
        self._upload: str | None = None

    def begin(self, num_bytes: int) -> None:
        """See :class:`girih.store.Sink`."""
        self._num_bytes = num_bytes
        self._part_bytes = max(self._part_bytes, -(-num_bytes // _MOST_PARTS))
        self._upload = self._call("create_multipart_upload")["UploadId"]

    def write_at(self, data: memoryview, position: int) -> None:
        """See :class:`girih.store.Sink`."""
        while len(data):
            number, begin = divmod(position, self._part_bytes)
            size = min(self._part_bytes, self._num_bytes - number * self._part_bytes)
            part, lacking = self._parts.pop(number) if number in self._parts else (bytearray(size), size)
            taken = min(len(data), size - begin)
            part[begin : begin + taken] = data[:taken]
            if lacking == taken:
                self._send(number, part)
            else:
                self._parts[number] = part, lacking - taken
            data, position = data[taken:], position + taken

    def finish(self) -> None:
        """See :class:`girih.store.Sink`."""
        parts = [
            {"PartNumber": number + 1, "ETag": sent.result()} for number, sent in sorted(self._sent.items())
        ]
        self._pool.shutdown()
        self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = None

    def abandon(self) -> None:
        """See :class:`girih.store.Sink`; the parts that were sent are removed."""
        self._pool.shutdown(cancel_futures=True)
        self._parts.clear()
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(GirihError):  # what went wrong before is raised
                self._call("abort_multipart_upload", UploadId=upload)

    def _send(self, number: int, part: bytearray) -> None:
        """Sends a part that is full, once there is room; raises what earlier ones met."""
        for sent in self._sent.values():
            if sent.done():
                sent.result()
        self._room.acquire()
        self._sent[number] = self._pool.submit(self._sent_as, number, part)

    def _sent_as(self, number: int, part: bytearray) -> str:
        try:
            answer = self._call(
                "upload_part", UploadId=self._upload, PartNumber=number + 1, Body=BytesIO(part)
            )
        finally:
            self._room.release()
        tag: str = answer["ETag"]
        return tag

    def _call(self, method: str, **options: Any) -> Any:
        with self._reaching():
            return self._files.call_s3(method, **self._object, **options)

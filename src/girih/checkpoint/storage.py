"""Storage of checkpoints: a local directory or any other fsspec address, with the same code.

A checkpoint is valid if its manifest exists and its checks pass, so no code depends on a rename. In a local directory,
a finished checkpoint is renamed to its final name, so that this name alone proves that the checkpoint is complete. In
an object store, a checkpoint is written at its final place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Semaphore
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from girih.errors import CheckpointError, ConfigError, GirihError, MissingFileError
from girih.files.sealed import open_file, refusing
from girih.files.whole import sync
from girih.store import DiskFile, Sink

PART_BYTES = 16 << 20
_MOST_PARTS = 10_000  # the limit of S3; S3 also accepts no part below 5 MiB except the last
_AT_ONCE = 4

Reaching = Callable[[], AbstractContextManager[object]]


class PartsUpload:
    """A :class:`girih.store.Sink` for an object of S3. The whole object appears when it is finished.

    Args:
        files: the file system of s3fs. path: the object in the file system.
        reaching: a context that converts errors of the object store to one-line errors.
        part_bytes: the size of a part. Parts are larger if the object would have too many parts.
    """

    def __init__(
        self, files: AbstractFileSystem, path: str, reaching: Reaching, part_bytes: int = PART_BYTES
    ) -> None:
        self._files, self._reaching, self._part_bytes = files, reaching, part_bytes
        bucket, key, _ = files.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._parts: dict[int, tuple[bytearray, int]] = {}  # number from 0 → bytes, number of missing bytes
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
        """See :class:`girih.store.Sink`. Removes the parts that were sent."""
        self._pool.shutdown(cancel_futures=True)
        self._parts.clear()
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(GirihError):  # the caller raises the earlier error
                self._call("abort_multipart_upload", UploadId=upload)

    def _send(self, number: int, part: bytearray) -> None:
        """Sends a full part, after waiting if too many parts are in flight. Raises the errors of earlier parts."""
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


WRITING, DOOMED = ".writing-", ".old-"
_PIECE = 16 << 20
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")


@dataclass(frozen=True)
class Storage:
    """A directory, or the keys of an object store with one prefix.

    Attributes:
        url: a path, or an fsspec address such as ``s3://bucket/run``.

    Raises:
        ConfigError: no installed file system supports the address.
    """

    url: str

    @classmethod
    def at(cls, address: Storage | str | os.PathLike[str]) -> Storage:
        """Returns the storage at a path or address."""
        if isinstance(address, Storage):
            return address
        text = os.fspath(address).removeprefix("file://")
        return cls(text if len(text) == 1 else text.rstrip("/"))

    def __truediv__(self, name: str) -> Storage:
        return Storage(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Storage:
        """The storage that contains this storage."""
        return Storage(self.url.rpartition("/")[0] or ("/" if self.url.startswith("/") else "."))

    @property
    def local(self) -> Path | None:
        """The directory if the storage is local, else None."""
        return None if _ADDRESS.match(self.url) else Path(self.url)

    def absolute(self) -> Storage:
        """Returns the same storage for a process with another current directory."""
        return self if self.local is None else Storage(os.path.abspath(self.url))

    @property
    def scratch(self) -> Path:
        """A local directory for files without a name, if possible in the same place as the written files."""
        local = self.local
        return local if local is not None and local.is_dir() else Path(tempfile.gettempdir())

    # Reading.

    def exists(self, name: str | None = None) -> bool:
        """Returns whether a file with this name exists. Without a name, returns whether the storage exists."""
        with self._reaching(name) as (files, path):
            return bool(files.exists(path))

    def names(self) -> list[str]:
        """Returns the names of the files and directories directly in this storage."""
        with self._reaching() as (files, path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            listed = files.ls(path, detail=False)
            return sorted({name for entry in listed if (name := entry.rstrip("/").rpartition("/")[2])})
        return []

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of every file in this storage, at any depth, by relative name."""
        with self._reaching() as (files, path):
            facts_of = files.find(path, detail=True)
            return {os.path.relpath(file, path): int(facts["size"]) for file, facts in facts_of.items()}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns a small file, or a range of bytes of a large file.

        Raises:
            MissingFileError: the file does not exist. CheckpointError: the file cannot be read.
        """
        if self.local is not None:
            with self.fetch(name) as file, refusing(f"{self}/{name}", "check the disk"):
                file.seek(start or 0)
                return file.read(-1 if end is None else max(0, end - (start or 0)))
        with self._reaching(name) as (files, path):
            return bytes(files.cat_file(path, start=start, end=end))

    @contextlib.contextmanager
    def fetch(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file that can be mapped into memory. A remote file is copied to a temporary file without a name.

        Raises:
            MissingFileError: the file does not exist.
            CheckpointError: the name is not a regular file, or is a link to a place outside of the directory.
        """
        if (local := self.local) is not None:
            with open_file(local / name, local) as file:
                yield file
            return
        with contextlib.ExitStack() as closing:
            with self._reaching(name) as (files, path):
                copy = closing.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(closing.enter_context(files.open(path, "rb")), copy, _PIECE)
                copy.flush()
                copy.seek(0)
            yield copy

    # Writing.

    def make(self) -> None:
        """Creates the directory, if the storage has directories."""
        if (local := self.local) is not None:
            local.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Creates a file, which gets its name when it is finished. After an error, no file is left.

        For S3, parts of the file are sent as soon as they are full. For another object store, the file is first written
        to a temporary local file without a name, and is sent when it is complete.
        """
        if (local := self.local) is not None:
            with _new_file(local / name) as file:
                yield DiskFile(file)
            return
        with self._reaching(name) as (files, path):
            in_parts = "s3" in _protocols(files)
        if in_parts:
            upload = PartsUpload(files, path, lambda: self._reaching(name))
            try:
                yield upload
            except BaseException:
                upload.abandon()
                raise
            return
        with tempfile.TemporaryFile() as file:
            yield DiskFile(file)
            file.seek(0)
            with self._reaching(name) as (files, path), files.open(path, "wb") as sent:
                shutil.copyfileobj(file, sent, _PIECE)

    def replace(self, name: str, content: bytes) -> None:
        """Replaces a file by new content. The old file stays until the new file is complete."""
        if (local := self.local) is None:
            with self._reaching(name) as (files, path):
                files.pipe_file(path, content)
            return
        with _new_file(local / f"{name}.new") as file:
            file.write(content)
        os.replace(local / f"{name}.new", local / name)

    def draft(self, name: str) -> Storage:
        """Returns the place to which a checkpoint is written before it gets the name ``name``."""
        return self / (f"{WRITING}{os.getpid()}" if self.local is not None else name)

    def publish(self, draft: Storage, name: str) -> None:
        """Gives a complete draft its final name. All of the draft is on the disk already."""
        old, root = draft.local, self.local
        if old is None or root is None:
            return
        for directory in (*sorted((p for p in old.rglob("*") if p.is_dir()), reverse=True), old):
            sync(directory)
        os.rename(old, root / name)
        sync(root)

    def remove(self, name: str, first: str) -> None:
        """Removes a file or directory. Begins with its name or the file ``first``, so that the rest is not read."""
        doomed = self / name
        if (local := doomed.local) is not None:
            if not local.exists():
                return
            if not name.startswith("."):
                doomed = self / f"{DOOMED}{name.removeprefix('step-')}"
                shutil.rmtree(doomed.url, ignore_errors=True)
                os.rename(local, doomed.url)
            shutil.rmtree(doomed.url)
            return
        with doomed._reaching() as (files, path):
            if files.exists(f"{path}/{first}"):
                files.rm_file(f"{path}/{first}")
            if files.exists(path):
                files.rm(path, recursive=True)

    @contextlib.contextmanager
    def _reaching(self, name: str | None = None) -> Iterator[tuple[AbstractFileSystem, str]]:
        """Yields the file system and the path in it. Converts errors to one-line errors."""
        url = self.url if name is None else f"{self.url}/{name}"
        try:
            if self.local is not None:
                files, path = LocalFileSystem(), os.path.abspath(url)
            else:
                files, path = url_to_fs(url, use_listings_cache=False)  # other processes write files too
        except (ImportError, ValueError) as error:
            hint = "; pip install 'girih[s3]'" if url.startswith("s3") else ""
            raise ConfigError(f"{url}: {_line(error)}{hint}") from None
        try:
            yield files, path
        except FileNotFoundError:
            raise MissingFileError(f"{url}: no such file") from None
        except GirihError:
            raise
        except Exception as error:  # each file system has different errors
            raise CheckpointError(f"{url}: {_line(error)}; check the address and the permissions") from error


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file. At the end the file is durably on the disk. After an error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _protocols(files: AbstractFileSystem) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

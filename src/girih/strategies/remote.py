"""What strategies whose tables are in embedding servers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from girih.comm.context import RunContext
from girih.errors import ConfigError
from girih.sparse.halves.remote import SERVER, WORKER, RemoteSparse
from girih.sparse.service.codec import Codec
from girih.sparse.spec import SparseSpec
from girih.strategies.counts import check_counts
from girih.training.feeds import LOADER, LoaderFeed
from girih.training.schedules import Pipelined, Schedule

TRANSPORTS = ("shared", "tcp")
PRECISIONS = ("float32", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStrategy:
    """Tables in processes of their own.

    Attributes:
        staleness: τ, the most batches of a trainer that are read but not yet applied when a batch is read.
        trainers, embedding_workers, embedding_servers, loaders: processes; trainers under ``torchrun`` as many
            as it starts.
        transport: between processes: "shared" memory, or "tcp".
        compress_ids: ids travel as unique ids with the examples they are in, without loss (Persia §4.2.3).
        wire_embeddings, wire_gradients: "float16" halves what goes between embedding workers and trainers, with
            a loss of up to 2⁻¹² of the largest number of each vector (Persia §4.2.3).
    """

    feed: ClassVar[type[LoaderFeed]] = LoaderFeed
    staleness: int = 4
    trainers: int = 1
    embedding_workers: int = 1
    embedding_servers: int = 1
    loaders: int = 1
    transport: Literal["shared", "tcp"] = "shared"
    compress_ids: bool = False
    wire_embeddings: Literal["float32", "float16"] = "float32"
    wire_gradients: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        check_counts(self, ("trainers", "embedding_workers", "embedding_servers", "loaders"))
        check_counts(self, ("staleness",), least=0)
        for name, valid in (
            ("transport", TRANSPORTS), ("wire_embeddings", PRECISIONS), ("wire_gradients", PRECISIONS),
            ("compress_ids", (True, False)),
        ):  # fmt: skip
            if getattr(self, name) not in valid:
                raise ConfigError(f"strategy: {name} = {getattr(self, name)!r}: expected one of {valid}")

    @property
    def roles(self) -> Mapping[str, int]:
        """Processes beside the trainers."""
        return {SERVER: self.embedding_servers, WORKER: self.embedding_workers, LOADER: self.loaders}

    @property
    def schedule(self) -> Schedule:
        """Lookups and updates beside dense compute."""
        return Pipelined(self.staleness)

    def address(self, host: str) -> str:
        """Where a process of a host is to listen; see :func:`girih.comm.rpc.listen`."""
        return "shm://" if self.transport == "shared" else f"tcp://{host}:*"

    def packets(self, spec: SparseSpec) -> Codec:
        """How ids and vectors travel."""
        return Codec.of(
            spec.schema,
            spec.needs,
            compress_ids=self.compress_ids,
            half_embeddings=self.wire_embeddings == "float16",
            half_gradients=self.wire_gradients == "float16",
        )

    def sparse_half(self, spec: SparseSpec, context: RunContext) -> RemoteSparse:
        """The way to the embedding workers."""
        return RemoteSparse(spec, self.packets(spec), context)

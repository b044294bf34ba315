"""Groups of trainers: collectives on explicit process groups, which can be split, aborted and created again."""

from girih.comm.group.trainers import TrainerGroup

__all__ = ["TrainerGroup"]

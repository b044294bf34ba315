"""Requests to scale a run, and their outcomes: files in its directory.

``scale.json`` exists while a scaling is requested or in progress, so there is one at a time. ``scaled.jsonl`` has a
line for each finished scaling. A request needs no connection to the run, and not its secret.

This module imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from girih.config import build, options
from girih.config.bounds import Finite
from girih.errors import MissingFileError, RunDirectoryError
from girih.files.sealed import open_file, parse, refusing
from girih.files.whole import append_line, write_whole
from girih.processes.lease import Lease

REQUEST, OUTCOMES = "scale.json", "scaled.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """A request to scale a run.

    Attributes:
        counts: role → wanted number of processes.
        asked_s: the time of the request, in seconds since 1970.
        why: the reason, if the run itself made the request; "" for a user's request.
        begun: the facts when training paused for it; None until then. ``step``, ``paused_s`` (since 1970), ``before``
            (role → processes) and ``lease``: the process that owns the run, if known.
    """

    name: str
    counts: Mapping[str, int]
    asked_s: float
    why: str = ""
    begun: Mapping[str, Any] | None = None

    @property
    def keeper(self) -> Lease | None:
        """The process that owns the run while trainers restart and nobody else holds it; None if it is not known."""
        return Lease.of((self.begun or {}).get("lease"))


def ask(run: Path, counts: Mapping[str, int], why: str = "") -> ScaleRequest:
    """Requests a scaling.

    Raises:
        RunDirectoryError: a scaling is in progress.
    """
    request = ScaleRequest(name=secrets.token_hex(8), counts=dict(counts), asked_s=time.time(), why=why)
    draft = run / f".{REQUEST}.{request.name}"
    draft.write_text(json.dumps(asdict(request)), encoding="utf-8")
    try:
        os.link(draft, run / REQUEST)  # atomic; fails if there is a request
    except FileExistsError:
        raise RunDirectoryError(f"{run}: another scaling is under way; wait for it, then ask again") from None
    finally:
        draft.unlink()
    return request


def pending(run: Path) -> ScaleRequest | None:
    """Returns the request that is waiting or in progress; None if there is none."""
    file = run / REQUEST
    with (
        contextlib.suppress(MissingFileError),
        open_file(file, kind=RunDirectoryError) as opened,
        refusing(file, "delete it, and ask again", RunDirectoryError),
    ):
        request: ScaleRequest = build(ScaleRequest, parse(opened.read()), "")
        if request.begun is not None:
            options.integer("begun.step", request.begun["step"], 0)
            build(Finite, request.begun["paused_s"], "begun.paused_s")
            build(dict[str, int], request.begun["before"], "begun.before")
        return request
    return None


def begin(
    run: Path, request: ScaleRequest, step: int, before: Mapping[str, int], keeper: Lease | None = None
) -> ScaleRequest:
    """Records that training has paused for a request."""
    lease = None if keeper is None else asdict(keeper)
    facts = {"step": step, "paused_s": time.time(), "before": dict(before), "lease": lease}
    begun = replace(request, begun=facts)
    write_whole(run / REQUEST, json.dumps(asdict(begun)))
    return begun


def fail(run: Path, request: ScaleRequest, why: str) -> None:
    """Records why a begun scaling failed. It is reported when training continues."""
    begun = {**(request.begun or {}), "failed": why}
    write_whole(run / REQUEST, json.dumps(asdict(replace(request, begun=begun))))


def end(run: Path, request: ScaleRequest) -> dict[str, Any]:
    """Records that a scaling is done, so that training may continue. Returns the later result of :func:`outcome`."""
    begun, now = request.begun or {}, time.time()
    return _record_outcome(
        run,
        request,
        step=begun["step"],
        roles={name: [begun["before"].get(name), count] for name, count in request.counts.items()},
        paused_s=round(now - begun["paused_s"], 3),
        seconds=round(now - request.asked_s, 3),
        at_s=round(now, 3),
        why=request.why,
    )


def refuse(run: Path, request: ScaleRequest, why: str) -> None:
    """Records that a request was refused, and nothing is scaled."""
    _record_outcome(run, request, refused=why)


def withdraw(run: Path) -> None:
    """Withdraws a request that nobody will do any more."""
    (run / REQUEST).unlink(missing_ok=True)


def withdraw_stale(run: Path) -> None:
    """Withdraws the request to a run that is over, unless its processes are only restarting."""
    with contextlib.suppress(RunDirectoryError):
        request = pending(run)
        if request is not None and request.begun and (request.keeper is None or request.keeper.lives):
            return
    withdraw(run)


def outcome(run: Path, request: ScaleRequest) -> dict[str, object] | None:
    """Returns the outcome of a request; None if there is none yet.

    ``refused`` says why nothing was scaled. Otherwise it has ``step``, ``roles`` (role → processes before and after),
    ``paused_s``, ``seconds`` since the request, ``at_s`` (since 1970), and ``why``.
    """
    return next((line for line in reversed(_lines(run)) if line["name"] == request.name), None)


def history(run: Path) -> list[dict[str, object]]:
    """Returns the outcomes of all scalings of a run, earliest first, without refused ones."""
    done = [line for line in _lines(run) if "refused" not in line]
    return [{key: value for key, value in line.items() if key != "name"} for line in done]


def _record_outcome(run: Path, request: ScaleRequest, **facts: object) -> dict[str, Any]:
    append_line(run / OUTCOMES, json.dumps({"name": request.name, **facts}))
    withdraw(run)
    return facts


def _lines(run: Path) -> list[dict[str, object]]:
    lines = []
    with contextlib.suppress(MissingFileError), open_file(run / OUTCOMES, kind=RunDirectoryError) as file:
        for line in file:
            with contextlib.suppress(ValueError):  # a line that was cut off
                lines.append(parse(line))
    return [each for each in lines if isinstance(each, dict) and "name" in each]


class ScaleStage(StrEnum):
    """Stages of a scaling that the launcher must know."""

    MOVING = "moving"
    """Rows are only in the last checkpoint: restarted trainers find none in embedding servers."""
    DONE = "done"
    """All processes exist, with their rows."""
    RESTART = "anew"
    """Trainers end with a checkpoint, and all processes restart."""

"""Runs Triton kernels: compiled for a GPU, or interpreted on the CPU if ``TRITON_INTERPRET=1`` is set.

Interpreted kernels take torch's CPU tensors, run one program after the other, and give the same results as compiled
kernels. Tests use them without a GPU. Each program costs Python time, so interpreted programs process more items.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from girih.errors import ConfigError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

VARYING = (
    "n", "step", "call", "num_slots", "rows_ever", "num_rows", "num_bags", "first_bag", "first", "num_ids", "num_examples",
    "num_features", "most_keys", "scratch", "amount", "limit",
)  # fmt: skip
"""Kernel arguments that change from step to step. Triton must not compile again if a value is 1 or a multiple of 16."""

SPARE = 1 << 12
"""The number of additional words after a hash table, for lanes without a key. A power of two.

``tl.atomic_cas`` has no mask, so lanes without a key must access some word. Lanes that share one word would wait for
each other.
"""

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Compiler options. Multiplication and addition round separately, and subnormal numbers are kept, as in CPU kernels."""

MOST_PROGRAMS = 3 if INTERPRETED else 1 << 13
"""Programs of a launch over keys. They take tiles of keys in turn, because only the GPU knows how many tiles have a key."""

kernel: Any = triton.jit(do_not_specialize=VARYING)
"""The decorator of kernels that :func:`launch` runs."""

_EXACT = {} if INTERPRETED else EXACT
_ONE_AT_A_TIME: AbstractContextManager[Any] = threading.Lock() if INTERPRETED else nullcontext()
"""A lock, because the interpreter replaces functions of ``triton.language`` in all threads while it runs a kernel."""


def _quicken() -> None:
    """Makes the interpreter replace Triton's functions once per kernel.

    By default, it replaces them in each function that a kernel calls.
    """
    from triton.runtime import interpreter

    whole, none = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if whole is None or none is None:
        return  # another version of Triton, which stays slower

    def patch(function: Any) -> Any:
        used = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        return none() if used and not any(tl.core.is_builtin(each.load) for each in used) else whole(function)

    interpreter._patch_lang = patch


if INTERPRETED:
    _quicken()


def device(number: int | None = None) -> torch.device:
    """Returns a device for the kernels of this process: the GPU with this number, or torch's current GPU.

    Raises:
        ConfigError: there is no GPU that torch can use.
    """
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("store: tiers = ['gpu']: torch finds no CUDA device here; use ['dram']")
    return torch.device("cuda", torch.cuda.current_device() if number is None else number)


def chosen(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which Triton launches on a device. By default, Triton uses torch's current device."""
    if INTERPRETED or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch(
    kernel: Any, num_items: int, block: int, *arguments: Any, in_turn: object = False, **options: Any
) -> None:
    """Runs a kernel on ``num_items`` items, with ``block`` items per program. The kernel gets ``block`` as ``BLOCK``.

    The kernel runs on the device of its tensors. The first argument must be a tensor. With ``in_turn``, at most
    ``MOST_PROGRAMS`` programs take tiles in turn.
    """
    if num_items > 0:
        programs = min(triton.cdiv(num_items, block), MOST_PROGRAMS if in_turn else num_items)
        with chosen(arguments[0].device), _ONE_AT_A_TIME:
            kernel[(programs,)](*arguments, BLOCK=block, **_EXACT, **options)


def block_of(compiled: int, num_items: int) -> int:
    """Returns the number of items per program. On a GPU it is ``compiled``.

    The interpreter gets a larger number, so that it runs only some dozens of programs. Each costs Python time.
    """
    return max(1024, columns_of(triton.cdiv(num_items, 32))) if INTERPRETED else compiled


def aligned(*num_bytes: int) -> bool:
    """Returns whether all numbers are multiples of 16, see :func:`girih.kernels.gpu.layout.columns_at`."""
    return not any(each % 16 for each in num_bytes)


def columns_of(width: int) -> int:
    """Returns the number of columns of a tile for rows of ``width``: the next power of two, which Triton requires."""
    return 1 << (width - 1).bit_length()


def rows_at_once(width: int, elements: int = 1024) -> int:
    """Returns the number of rows per program for kernels on tiles of rows with ``width`` columns."""
    return max(1, (16 * elements if INTERPRETED else elements) // columns_of(width))

"""Triton for this package: compiled for a GPU, or interpreted on the CPU if ``TRITON_INTERPRET=1`` is set.

Interpreted kernels take torch's CPU tensors, run one program after the other, and give the same results as compiled
kernels. Tests use them without a GPU. Each interpreted program processes more items, because each program costs
Python time.
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
"""Kernel arguments that change from step to step. Triton must not compile again if one is 1, or a multiple of 16."""

SPARE = 1 << 12
"""The number of words after a hash table, a power of two, for lanes without a key.

``tl.atomic_cas`` takes no mask, and lanes that share one word would wait for each other.
"""

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Options that round multiplication and addition separately and keep subnormal numbers, as in CPU kernels."""

kernel: Any = triton.jit(do_not_specialize=VARYING)
"""Marks a kernel that :func:`launch` runs."""

_EXACT = {} if INTERPRETED else EXACT
_ONE_AT_A_TIME: AbstractContextManager[Any] = threading.Lock() if INTERPRETED else nullcontext()
"""While the interpreter runs a kernel, it replaces functions of ``triton.language`` in all threads."""


def _quicken() -> None:
    """Makes the interpreter replace Triton's functions once per kernel.

    By default, it replaces them in each function that a kernel calls.
    """
    from triton.runtime import interpreter

    whole, none = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if whole is None or none is None:
        return  # another version of Triton: keep its speed

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
    """Makes Triton launch on a device. By default, Triton uses torch's current device, often the first."""
    if INTERPRETED or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch(kernel: Any, num_items: int, block: int, *arguments: Any, **options: Any) -> None:
    """Runs a kernel on ``num_items``, with ``block`` items per program. The kernel receives this number as ``BLOCK``.

    The kernel runs on the device of its tensors. The first argument must be a tensor.
    """
    if num_items > 0:
        with chosen(arguments[0].device), _ONE_AT_A_TIME:
            kernel[(triton.cdiv(num_items, block),)](*arguments, BLOCK=block, **_EXACT, **options)


def block_of(compiled: int, num_items: int) -> int:
    """Returns the number of items per program, ``compiled`` on a GPU.

    The interpreter uses some dozens of programs, because each program costs Python time.
    """
    return max(1024, columns_of(triton.cdiv(num_items, 32))) if INTERPRETED else compiled


def aligned(*num_bytes: int) -> bool:
    """Returns whether all are multiples of 16 bytes, see :func:`girih.kernels.gpu.layout.columns_at`."""
    return not any(each % 16 for each in num_bytes)


def columns_of(width: int) -> int:
    """Returns the number of columns of a tile for rows of ``width``: the next power of two, which Triton requires."""
    return 1 << (width - 1).bit_length()


def rows_at_once(width: int, elements: int = 1024) -> int:
    """Returns the number of rows of a program that works on tiles of rows of ``width`` columns."""
    return max(1, (16 * elements if INTERPRETED else elements) // columns_of(width))

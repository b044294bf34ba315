"""Triton as this package uses it: compiled for a GPU, or interpreted on the CPU where ``TRITON_INTERPRET=1`` is set.

Interpreted kernels take torch's CPU tensors, run one program after the other, and give what the compiled ones give;
tests run them where there is no GPU. A program does more at a time then, since each costs Python.
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
"""Arguments of kernels that change from step to step: Triton must not compile again if one is 1, or a multiple of 16."""

SPARE = 1 << 12
"""Words behind a hash table, a power of two, for lanes that have no key: ``tl.atomic_cas`` takes no mask, and all lanes at one word would wait for each other."""

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Multiplication and addition round separately, and subnormal numbers stay, as in the kernels for CPUs."""

kernel: Any = triton.jit(do_not_specialize=VARYING)
"""Marks a kernel that :func:`launch` runs."""

_EXACT = {} if INTERPRETED else EXACT
_ONE_AT_A_TIME: AbstractContextManager[Any] = threading.Lock() if INTERPRETED else nullcontext()
"""While the interpreter runs a kernel, it has other functions stand for those of ``triton.language``, in all threads."""


def _quicken() -> None:
    """Has the interpreter put its functions in the place of Triton's once a kernel: by itself it does so in each function that a kernel calls."""
    from triton.runtime import interpreter

    whole, none = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if whole is None or none is None:
        return  # another Triton, which is as quick as it is

    def patch(function: Any) -> Any:
        used = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        return none() if used and not any(tl.core.is_builtin(each.load) for each in used) else whole(function)

    interpreter._patch_lang = patch


if INTERPRETED:
    _quicken()


def device(number: int | None = None) -> torch.device:
    """A device that kernels of this process can work on: the GPU of a number, or the one that torch has chosen here.

    Raises:
        ConfigError: there is no GPU that torch can use.
    """
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("store: tiers = ['gpu']: torch finds no CUDA device here; use ['dram']")
    return torch.device("cuda", torch.cuda.current_device() if number is None else number)


def chosen(device: torch.device) -> AbstractContextManager[object]:
    """Has Triton launch on a device: it takes the one that torch has chosen in this thread, which is often the first."""
    if INTERPRETED or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch(kernel: Any, num_items: int, block: int, *arguments: Any, **options: Any) -> None:
    """Runs a kernel on ``num_items``, ``block`` of them a program, which it is given as ``BLOCK``.

    It runs on the device of the tensors, of which the first argument is one.
    """
    if num_items > 0:
        with chosen(arguments[0].device), _ONE_AT_A_TIME:
            kernel[(triton.cdiv(num_items, block),)](*arguments, BLOCK=block, **_EXACT, **options)


def block_of(compiled: int, num_items: int) -> int:
    """Items of one program: ``compiled`` on a GPU; the interpreter, for which each program costs Python, has some dozens of programs."""
    return max(1024, columns_of(triton.cdiv(num_items, 32))) if INTERPRETED else compiled


def aligned(*num_bytes: int) -> bool:
    """Whether all are multiples of 16 bytes, see :func:`girih.kernels.gpu.layout.columns_at`."""
    return not any(each % 16 for each in num_bytes)


def columns_of(width: int) -> int:
    """Columns of a tile that holds rows of ``width``: the next power of two, as Triton wants it."""
    return 1 << (width - 1).bit_length()


def rows_at_once(width: int, elements: int = 1024) -> int:
    """Rows of a program that works on tiles of rows of ``width`` columns."""
    return max(1, (16 * elements if INTERPRETED else elements) // columns_of(width))

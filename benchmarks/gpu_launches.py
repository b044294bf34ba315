"""Launches of GPU kernels, recorded from interpreted runs and compiled through Triton's launcher without a GPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

CAPABILITY = 90
"""An H100 or H200."""
ON_KEYS = {
    "_claim": 256, "_find_first": 1024, "_number": 256, "_describe_terms": 256, "read_known": 256, "ask_admission": 256,
    "add_sightings": 256, "count_read": 1024, "count_moved": 1024, "_number_rows": 1024, "make_rows": 256, "rows_to_move": 256,
    "_find_largest": 4096,
}  # fmt: skip
"""Kernels of a step that work on ids, keys or numbers one by one, and the items of a program on a GPU."""
_LARGE = 1 << 40


@contextlib.contextmanager
def recording(note: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Calls ``note`` with a description of each launch, then runs the kernel."""
    from girih.kernels.gpu import jit

    launch = jit.launch

    def noted(
        kernel: Any, num_items: int, block: int, *arguments: Any, in_turn: bool = False, **options: Any
    ) -> None:
        note(describe_launch(kernel, block, arguments, options))
        launch(kernel, num_items, block, *arguments, in_turn=in_turn, **options)

    modules = [module for name, module in sys.modules.items() if name.startswith("girih.")]
    modules = [module for module in modules if getattr(module, "launch", None) is launch]
    for module in modules:
        module.launch = noted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.launch = launch  # type: ignore[attr-defined]


def describe_launch(
    kernel: Any, block: int, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """A launch as JSON, with tiles as large as on a GPU; launches that share a binary are equal."""
    import torch

    from girih.kernels.gpu.jit import VARYING

    def describe_argument(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype)
        if name.isupper() or isinstance(value, bool | float):  # upper case: compiled in
            return value
        if value == 1 and name not in VARYING:
            return 1
        aligned = value % 16 == 0 and name not in VARYING
        return (16 if aligned else 7) + (_LARGE if value >= 1 << 31 else 0)

    name = kernel.fn.__name__
    columns = options.get("COLUMNS") or options.get("WORDS")
    rows = max(1, 1024 // columns) if columns else ON_KEYS.get(name, 256)
    wide = name in ("_sum_pieces", "write_initial")
    sizes = {"BLOCK": 1 if block == 1 else 256 if name == "write_initial" else rows}
    if "AT_ONCE" in options:
        sizes["AT_ONCE"] = min(256 if wide else 128, rows)
    return {
        "module": kernel.fn.__module__,
        "name": name,
        "arguments": [describe_argument(*each) for each in zip(kernel.arg_names, arguments, strict=False)],
        "options": {each: describe_argument(each, value) for each, value in {**options, **sizes}.items()},
    }


class _Driver:
    """The driver of a GPU that need not be in this machine."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Mapping[str, Any], varying: int = 7, **options: Any) -> Any:
    """The binary of a described launch. Triton binds, specializes and compiles as in a real launch.

    Args:
        varying: the value of arguments that change from step to step.
        options: of the compiler.
    """
    import torch
    import triton
    from triton.runtime.jit import MockTensor

    from girih.kernels.gpu.jit import EXACT, VARYING

    triton.runtime.driver.set_active(_Driver())
    kernel = getattr(importlib.import_module(launch["module"]), launch["name"])

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return MockTensor(getattr(torch, value.removeprefix("torch.")))
        return value - 7 + varying if name in VARYING else value

    arguments = [argument(*each) for each in zip(kernel.arg_names, launch["arguments"], strict=False)]
    named = {name: argument(name, value) for name, value in launch["options"].items()}
    return kernel.warmup(*arguments, grid=(1,), **named, **EXACT, **options)

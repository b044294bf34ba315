"""Compiles kernels for a GPU that need not be here: ``python compiling.py FILE``, with the launches that FILE lists.

Each line of FILE is JSON: module and name of a kernel, the type of each argument, and the values that are compiled in.
"""

import importlib
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)  # an H100 or H200


def main() -> None:
    failed = 0
    with open(sys.argv[1]) as lines:
        for line in lines:
            wanted = json.loads(line)
            kernel = getattr(importlib.import_module(wanted["module"]), wanted["name"])
            source = ASTSource(fn=kernel, signature=wanted["types"], constexprs=wanted["values"])
            try:
                made = triton.compile(source, target=TARGET, options={"enable_fp_fusion": False})
                assert "fma" not in made.asm["ptx"] or wanted["name"] not in ("write_initial",)
            except Exception as error:
                failed += 1
                print(f"{wanted['name']} {wanted['values']}: {type(error).__name__}: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

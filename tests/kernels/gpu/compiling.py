"""Compiles kernels for a GPU that need not be here: ``python compiling.py FILE``, with the launches that FILE lists.

Each line of FILE is JSON: module and name of a kernel, the type of each argument, the values that are compiled in, and if need be which integers are
multiples of 16, and the file that PTX is written to.
"""

import importlib
import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from girih.kernels.gpu.jit import EXACT

TARGET = GPUTarget("cuda", 90, 32)  # an H100 or H200


def main() -> None:
    failed = 0
    with open(sys.argv[1]) as lines:
        for line in lines:
            wanted = json.loads(line)
            kernel = getattr(importlib.import_module(wanted["module"]), wanted["name"])
            types = wanted["types"]
            aligned = {
                (place,): [["tt.divisibility", 16]]
                for place, (name, kind) in enumerate(types.items())
                if kind[0] == "*" or name in wanted.get("multiples", ())
            }
            source = ASTSource(fn=kernel, signature=types, constexprs=wanted["values"], attrs=aligned)
            try:
                made = triton.compile(source, target=TARGET, options=EXACT)
                if wanted["name"] == "write_initial" and "fma.rn.f64" in made.asm["ptx"]:
                    raise ValueError("a product and a sum of an initial value are rounded as one")
                if "ptx" in wanted:
                    Path(wanted["ptx"]).write_text(made.asm["ptx"])
            except Exception as error:
                failed += 1
                print(f"{wanted['name']} {wanted['values']}: {type(error).__name__}: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Compiles kernels without a GPU: ``python compiling.py FILE [--all]``.

Each line of FILE is a launch as ``gpu_launches.py`` describes it, and may say whether rows move 16 bytes at once (``vectors``).
``--all`` fails if a kernel of the repository is in no launch.
"""

import importlib
import json
import re
import sys
import traceback
from pathlib import Path

import gpu_launches
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[3]
_DECORATOR = re.compile(r"^@(triton\.jit|(jit\.)?kernel)\b", re.MULTILINE)


def modules():
    """All modules of the repository that define kernels."""
    for folder in ("src", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not _DECORATOR.search(path.read_text()):
                continue
            if folder == "src":
                yield importlib.import_module(".".join(path.relative_to(ROOT / folder).with_suffix("").parts))
            else:
                sys.path.append(str(path.parent))
                yield importlib.import_module(path.stem)


def kernels(module):
    """The names of a module's kernels: functions with ``BLOCK``, which every launch passes, that return nothing."""
    functions = {name: each for name, each in vars(module).items() if isinstance(each, JITFunction)}
    return {
        name
        for name, function in functions.items()
        if function.module == module.__name__
        and "BLOCK" in function.arg_names
        and function.fn.__annotations__.get("return") in (None, "None")
    }


def check(launch):
    """Compiles a launch. Arguments that change from step to step must not change the binary."""
    binaries = [gpu_launches.compiled(launch, varying) for varying in (7, 1, 16)]
    if len({id(binary) for binary in binaries}) > 1:
        raise ValueError("arguments of 1, 7 and 16 give several binaries; mark the kernel with `jit.kernel`")
    ptx = binaries[0].asm["ptx"]
    if launch["name"] == "write_initial" and "fma.rn.f64" in ptx:
        raise ValueError("a product and a sum of an initial value are rounded as one")
    verb = "st" if launch["name"] in ("write_initial", "assign_rows") else "ld"
    if launch.get("vectors") not in (None, f"{verb}.global.v4.b32" in ptx):
        raise ValueError(f"16 bytes of a row at once: expected {launch['vectors']}")


def main():
    launches = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    failures = []
    if "--all" in sys.argv:
        known = {(launch["module"], launch["name"]) for launch in launches}
        for module in modules():
            for name in sorted(kernels(module)):
                if (module.__name__, name) not in known:
                    failures.append(
                        f"{module.__name__}.{name}: the test launches it nowhere; add a launch to test_gpu_compiles.py"
                    )
    for launch in launches:
        try:
            check(launch)
        except Exception:
            failures.append(f"{launch}\n{traceback.format_exc(limit=-2)}")
    print("\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

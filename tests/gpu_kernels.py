"""A pytest plugin for ``make test-gpu``: fails if no test ran some GPU kernel.

It counts every function of girih that Triton's interpreter runs: kernels, and functions that kernels call. A test that
launches kernels without a look at their results does not count.
"""

import importlib
from pathlib import Path

import pytest

import girih.kernels.gpu
from girih.kernels.gpu import jit

RUN = set()
"""Names of functions that workers ran."""
WITHOUT_RESULTS = "test_gpu_compiles.py"
"""The file whose tests only compile what they launch."""


def functions_run():
    """Names of the functions that this process interpreted."""
    from triton.runtime.interpreter import InterpretedFunction

    return {f"{function.__module__}.{function.__name__}" for function in InterpretedFunction.rewritten_fn}


def all_functions():
    """Names of the functions in ``girih.kernels.gpu``."""
    from triton.runtime.interpreter import InterpretedFunction

    names = set()
    for path in Path(girih.kernels.gpu.__path__[0]).glob("*.py"):
        module = importlib.import_module(f"girih.kernels.gpu.{path.stem}")
        for function in vars(module).values():
            if isinstance(function, InterpretedFunction):
                names.add(f"{function.fn.__module__}.{function.fn.__name__}")
    return names


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """Forgets what a test ran first if it looks at no results, so that another test has to run it."""
    from triton.runtime.interpreter import InterpretedFunction

    rewritten = InterpretedFunction.rewritten_fn
    before = set(rewritten)
    yield
    if item.path.name == WITHOUT_RESULTS:
        for function in set(rewritten) - before:
            del rewritten[function]


def pytest_testnodedown(node):
    """Takes the names that a worker sends."""
    RUN.update(getattr(node, "workeroutput", {}).get("functions_run", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Sends a worker's names, or compares all names with the kernels."""
    if not jit.INTERPRETED:
        return
    RUN.update(functions_run())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["functions_run"] = sorted(RUN)
    elif session.exitstatus == pytest.ExitCode.OK and not any(
        map(session.config.getoption, ("file_or_dir", "keyword", "collectonly"))
    ):
        missing = sorted(all_functions() - RUN)
        if missing:
            session.config.get_terminal_writer().line(
                f"\nno smoke test runs {', '.join(missing)}: mark one with pytest.mark.smoke", red=True
            )
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""The command of every process that girih starts."""

import sys


def module_command(module: str, *words: str) -> list[str]:
    """A command that runs a module, as ``python -m`` does, but never a file of the working directory in its place.

    ``-P`` leaves the working directory off the import path: a file ``http.py`` or ``queue.py`` that lies where the user
    works would otherwise be imported for the module of that name. Classes that a config names are found all the same,
    see :func:`girih.config.user_code.load_class`.
    """
    return [sys.executable, "-P", "-m", module, *words]

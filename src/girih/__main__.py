"""Runs the command line: ``python -m girih``.

Python puts the working directory at the start of the import path, so a file ``http.py`` there would replace the module
of this name. This module moves the directory to the end. The processes that girih starts inherit the path.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    version = sys.version.split()[0]
    sys.stderr.write(f"girih: needs Python 3.11 or later; {sys.executable} is Python {version}\n")
    sys.exit(2)

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

from girih.processes.pipe import bind_life

bind_life()

from girih.cli import main  # noqa: E402 (it takes long)

main()

"""``python -m girih`` is the command line.

Python puts the working directory in front of the import path, where a file ``http.py`` would be imported for the module of
that name. It is moved to the end, where the processes that girih starts have it too.
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

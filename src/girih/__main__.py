"""``python -m girih`` is the command line."""

from girih.cli import main

main()

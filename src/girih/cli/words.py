"""Options that take several words: ``--keep user item`` is ``--keep user --keep item``.

A shell expands ``--data new/*.parquet`` to several words, and click takes one a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SEVERAL = ("--data", "--keep", "--set")
ONE = ("--out", "--run", "--strategy")
ASSIGNMENT = re.compile(r"[\w.]+=")


def spread(words: Iterable[str]) -> list[str]:
    """Repeats an option before each of its words.

    Words after ``--data`` and ``--keep`` are theirs up to the next option, once the run was named; before
    that only the first one is. Words after ``--set`` are its own as long as they assign.
    """
    result: list[str] = []
    option, is_first, num_named = None, False, 0
    for word in words:
        if word.startswith("-"):
            option, is_first = (word if word in (*SEVERAL, *ONE) else None), True
        elif option is not None and is_first:
            option, is_first = (None if option in ONE else option), False
        elif option is not None and (ASSIGNMENT.match(word) if option == "--set" else num_named > 1):
            result.append(option)
        else:
            option = None
            num_named += 1  # the command, then its run or config
        result.append(word)
    return result

"""Each tutorial runs as one script, from its first block to its last, in one directory, and prints what the page shows.

- A ``python`` block runs in the session of the page. If its first line is ``# NAME.py``, it is written to that file instead.
- A ``toml`` block whose first line is ``# NAME.toml`` is written to that file.
- In a ``console`` block each line after ``$`` runs. ``girih serve`` runs in the background until the page ends, and another port
  takes the place of its port everywhere on the page. Installing is skipped. A line ending in ``\\`` goes on in the next line.
- The output is in the ``console`` block below the command, or in a ``text`` block after a ``python`` or ``console`` block. Its
  lines are in the output, in this order. A part ``…`` stands for any text, whole numbers are equal, and other numbers are close.
- Other languages are only shown.
"""

import contextlib
import io
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from girih import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"\d(?:[\d,]*\d)?(?:\.\d+)?"
TOKEN = re.compile(rf"({NUMBER})|(…)|(\s+)|(.)")
FILE = re.compile(r"# ([\w/]+\.(?:py|toml))\n")
SKIPPED = ("pip", "python3 -m venv", ".")
CLOSE = 0.02
"""The difference that a number with a decimal point may have, or this part of the number."""
START_S = 120


class Page:
    """A page that is being read and typed, in the working directory."""

    def __init__(self):
        self.names = {"__name__": "__main__"}
        self.output = ""
        self.ports = {}
        self.servers = []

    def read(self, text):
        for kind, code in BLOCK.findall(text):
            for shown, used in self.ports.items():
                code = re.sub(rf"\b{shown}\b", used, code)
            if (named := FILE.match(code)) and kind in ("python", "toml"):
                Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
                Path(named[1]).write_text(code)
            elif kind == "python":
                self.output = self._python(code)
            elif kind == "console":
                self._console(code.replace("\\\n", " "))
            elif kind == "text":
                check(code.splitlines(), self.output)

    def _python(self, code):
        with written() as printed:
            exec(compile(code, "<tutorial>", "exec"), self.names)
        return printed.getvalue()

    def _console(self, code):
        shown = []
        for line in code.splitlines():
            if not line.startswith("$ "):
                shown.append(self._with_ports(line))
                continue
            check(shown, self.output)
            shown, self.output = [], self._command(line[2:])
        check(shown, self.output)

    def _with_ports(self, line):
        for shown, used in self.ports.items():
            line = re.sub(rf"\b{shown}\b", used, line)
        return line

    def _command(self, line):
        words = shlex.split(line, comments=True)
        if line.startswith(SKIPPED):
            return ""
        if words[:2] == ["girih", "serve"]:
            return self._serve(words[1:])
        if words[0] != "girih":
            done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            return done.stdout
        with written() as printed:
            status = cli.run(words[1:])
        assert status == 0, f"{line}\n{printed.getvalue()}"
        return printed.getvalue()

    def _serve(self, words):
        """Starts a server at a free port, and returns its lines up to the line that says where it answers."""
        place = words.index("--port") + 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            used = str(free.getsockname()[1])
        self.ports[words[place]], words[place] = used, used
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        server = subprocess.Popen(
            [sys.executable, "-m", "girih", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        watchdog = threading.Timer(START_S, server.kill)
        watchdog.start()
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("serving "):
                break
        watchdog.cancel()
        if not lines or not lines[-1].startswith("serving "):
            server.kill()
            server.communicate()
            pytest.fail("no server: " + "".join(lines))
        reader = threading.Thread(target=server.stdout.read, daemon=True)
        reader.start()
        self.servers.append((server, reader))
        return "".join(lines)

    def close(self):
        for server, reader in self.servers:
            server.kill()
            server.wait()
            reader.join()
            server.stdout.close()


@contextlib.contextmanager
def written():
    """Everything that a block writes: to standard output and error, and warnings of loggers."""
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        logging.getLogger("girih").addHandler(handler)
        try:
            yield printed
        finally:
            logging.getLogger("girih").removeHandler(handler)


def check(shown, output):
    """Fails unless the lines that a page shows are lines of the output, in this order."""
    lines = iter(output.splitlines())
    for line in shown:
        if line.strip() in ("", "…"):
            continue
        assert any(alike(line, printed) for printed in lines), f"not printed: {line}\n{output}"


def alike(shown, printed):
    pattern, numbers = "", []
    for number, rest, space, other in TOKEN.findall(shown.strip()):
        if number:
            numbers.append(number)
        pattern += f"({NUMBER})" if number else ".*?" if rest else r"\s+" if space else re.escape(other)
    found = re.fullmatch(pattern, printed.strip())
    return found is not None and all(map(close, numbers, found.groups()))


def close(shown, printed):
    if "." not in shown:
        return shown == printed
    mine, theirs = (float(number.replace(",", "")) for number in (shown, printed))
    return abs(mine - theirs) <= CLOSE * max(1.0, abs(mine))


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    page = Page()
    try:
        page.read(path.read_text(encoding="utf-8"))
    finally:
        page.close()
        own = {name for name in set(sys.modules) - before if file_of(name).startswith(str(tmp_path))}
        for name in own:
            del sys.modules[name]


def file_of(name):
    return str(getattr(sys.modules[name], "__file__", None))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_is_short_and_its_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    assert 400 <= len(BLOCK.sub("", text).split()) <= 1000
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("auc 0.75", "auc 0.7612", True),
        ("auc 0.75", "auc 0.79", False),
        ("300 rows", "301 rows", False),
        ("took … s, 300 rows", "took 1.2 s, 300 rows", True),
        ("0.5  0.6", "0.51 0.6", True),
        ("a [1] (b.c) 2,000.0", "a [1] (b.c) 2,001.5", True),
    ],
)
def test_lines_are_compared_by_words_and_numbers(shown, printed, same):
    assert alike(shown, printed) is same

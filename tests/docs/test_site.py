"""The documentation site: each link leads somewhere, each name has a page, and each page opens in a browser without errors."""

import asyncio
import functools
import http.server
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
import pytest

import girih
from girih.app.run_config import keys_by_section
from girih.cli import COMMANDS

ROOT = Path(__file__).parents[2]
with mock.patch.object(sys, "path", [str(ROOT / "dev"), *sys.path]):
    import api
SITE = ROOT / "site"
SOURCES = ("README.md", "docs", "src/girih", "dev")
ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
"""Events of the browser; an entry of the log counts if its level is "error"."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The links of a page, and the names that links can lead to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links += [found[key] for key in ("href", "src") if found.get(key)]


@pytest.fixture(scope="module")
def site():
    """The folder of the site, built unless it is newer than all of its sources."""
    files = [
        path for source in SOURCES for path in (ROOT / source, *(ROOT / source).rglob("*")) if path.is_file()
    ]
    newest = max(path.stat().st_mtime for path in files if path.suffix in (".md", ".py", ".svg"))
    index = SITE / "index.html"
    if not index.is_file() or index.stat().st_mtime < newest:
        subprocess.run([sys.executable, ROOT / "dev" / "build_docs.py"], check=True, cwd=ROOT)
    return SITE


@pytest.fixture(scope="module")
def address(site):
    """The site's address, served by this process."""
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_each_link_leads_to_a_file_and_a_heading(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        here = "http://site/" + path.relative_to(site).as_posix().removesuffix("index.html")
        for link in page.links:
            target = urlsplit(urljoin(here, link))
            if target.netloc != "site":
                continue
            file = site / unquote(target.path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            name = unquote(target.fragment)
            missing = file in pages and name and name not in pages[file].names and not name.startswith("__")
            if not file.is_file() or missing:
                broken.append((str(path.relative_to(site)), link))
    assert not broken
    assert sum(path.name == "index.html" for path in pages) >= 40


def test_each_public_name_key_and_command_has_its_entry(site):
    folder, names = site / "reference" / "api", set(api.page_names(api.load()))
    assert {path.name for path in folder.iterdir()} == names
    assert names >= set(girih.__all__) - {"__version__"}
    pages = {name: (folder / name / "index.html").read_text() for name in names}
    assert [name for name, page in pages.items() if page.count(">Examples:<") == 0] == []
    members = [
        (name.split(".")[0] if name.split(".")[0] in api.MODULES else name, f"{target.name}.{member}")
        for name, target in api.public_names(api.load())
        if target.is_class
        for member, found in api.members_of(target)
        if found.docstring and found.is_function
    ]
    assert [member for page, member in members if f'.{member}"' not in pages[page]] == []
    keys = (site / "reference" / "keys" / "index.html").read_text()
    commands = (site / "reference" / "commands" / "index.html").read_text()
    sections = keys_by_section()
    assert [key for names in sections.values() for key in names if f"<code>{key}</code>" not in keys] == []
    assert [name for name in COMMANDS if f"Usage: girih {name} " not in commands] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 420])
def test_each_page_opens_without_errors_and_fits(address, site, tmp_path, width):
    places = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    if width == 420:
        places = places[::8]  # the layout is that of the theme
    found = asyncio.run(
        open_all([address if place == "." else f"{address}{place}/" for place in places], width, tmp_path)
    )
    assert found == []


async def open_all(addresses, width, folder):
    """Opens pages in a browser, in turn; returns an error or a width beyond the window's for each that has one."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}",
        "about:blank", stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = folder / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not port.is_file() or not port.read_text():
                await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            listed = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
            async with session.get(listed) as answer:
                tab = next(each for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await browser.call(f"{domain}.enable")
                await browser.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=900,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                return [problem for each in addresses for problem in await browser.visit(each, width)]
    finally:
        process.terminate()
        await process.wait()


class Browser:
    """A tab of Chromium, by its remote debugging protocol."""

    def __init__(self, socket):
        self.socket, self.number, self.events = socket, 0, []

    async def call(self, method, **parameters):
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        return await self.until(lambda message: message.get("id") == self.number)

    async def until(self, wanted):
        async with asyncio.timeout(60):
            while not wanted(message := await self.socket.receive_json()):
                self.events.append(message)
        return message

    async def visit(self, address, width):
        self.events.clear()
        await self.call("Page.navigate", url=address)
        if not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            await self.until(lambda message: message.get("method") == "Page.loadEventFired")
        shown = await self.call("Runtime.evaluate", expression="document.documentElement.scrollWidth")
        problems = [
            event
            for event in self.events
            if event.get("method") in ERRORS
            and event["params"].get("entry", {}).get("level", "error") == "error"
        ]
        if (scrolled := shown["result"]["result"]["value"]) > width:
            problems.append(f"{scrolled} pixels wide in a window of {width}")
        return [(address, problem) for problem in problems]

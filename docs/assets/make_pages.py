"""Takes pictures of the built site, in a real browser: `make docs`, then `python docs/assets/make_pages.py`.

Writes front.png and tutorial.png beside this file. It needs Chromium or Chrome.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = HERE.parent.parent / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 1180
PICTURES = {"front.png": "index.html", "tutorial.png": "tutorial-server.html"}


def main() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)} (on Debian: apt-get install chromium)")
    if not (SITE / "index.html").exists():
        sys.exit("there is no site: run `make docs` first")
    for picture, page in PICTURES.items():
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}",
                    f"--screenshot={HERE / picture}", (SITE / page).as_uri(),
                ],
                check=True, capture_output=True, timeout=120,
            )  # fmt: skip
        print(HERE / picture)


if __name__ == "__main__":
    main()

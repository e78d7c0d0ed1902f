"""Open pages in a headless Chromium without a driver. It is installed if it is missing and that is possible."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # with its sandbox, Chromium refuses to start as root
)


def run(command: list[str], timeout: float) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}"
    return done.stdout


def find_browser() -> str:
    """Return the command of a Chromium that starts, or skip the test."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        if found is None:
            for command in ("update", "install --yes --no-install-recommends chromium fonts-dejavu-core"):
                run(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command.split()], timeout=400)
        run([found or NAMES[0], "--version"], timeout=60)  # Ubuntu's package may be a stub that asks for a snap
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no browser: {error}")
    return found or NAMES[0]


def open_page(browser: str, page: Path, width: int, height: int, picture: Path | None = None) -> str:
    """Return the DOM of the loaded page as HTML. With ``picture``, write a PNG of it to that file instead."""
    with tempfile.TemporaryDirectory(prefix="browser-") as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        action = "--dump-dom" if picture is None else f"--screenshot={picture}"
        return run([*command, action, page.resolve().as_uri()], timeout=120)

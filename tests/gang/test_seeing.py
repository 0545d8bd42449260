"""Looking into a gang of two stages from another terminal, while it serves and while it hangs."""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from textual.widgets import DataTable, RichLog

from tests.gang.gangs import ROOT, RunningGang, gang, workerctl
from tests.gang.test_gang_serving import decode, prompt
from tests.processes import stop
from worker.ctl.top_app import TopApp
from worker.run_files import RunFiles
from workerproto.client import Client
from workerproto.messages import Event, Refused, Result


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    run_dir = Path(tempfile.mkdtemp(prefix="rankd-"))
    with gang(run_dir, tmp_path_factory.mktemp("seeing"), "--metrics-port", "0", pp=2) as running:
        yield running.wait_ready()
    shutil.rmtree(run_dir, ignore_errors=True)


def test_stacks_of_all_and_of_one(serving: RunningGang) -> None:
    answer = workerctl(serving.run_dir, "stacks", "--name", "g")
    assert answer.returncode == 0, answer.stderr + answer.stdout  # all told within LIMIT_S, below the promised second
    sections = answer.stdout.split("== ")[1:]
    assert [section.split(",")[0] for section in sections] == ["rank 0", "rank 1", "coordinator"]
    for section in sections[:2]:
        assert "in _compute" in section
        assert "in _watch" in section
        assert section.count("most recent call first") >= 3
    one = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "1")
    assert one.stdout.startswith("== rank 1,")
    assert "== rank 0" not in one.stdout
    none = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "7")
    assert none.stderr == "rankd: error: --rank is 7, the gang's ranks on this host are 0 to 1\n"
    assert workerctl(serving.run_dir, "stacks", "--name", "nobody").returncode == 3
    assert serving.status()["state"] == "READY", "nobody was hurt by the signal"


@pytest.fixture
def client(serving: RunningGang) -> Iterator[Client]:
    with serving.client(name="a test", timeout=10) as client:
        client.wait_ready(10)
        yield client


def run_steps(client: Client, count: int) -> None:
    """One request: a prompt, and then a step a token."""
    client.submit(prompt(1, [1, 2, 3], [5, 6]))
    for position in range(3, 2 + count):
        answer_of(client)
        client.submit(decode(1, position))
    answer_of(client)


def answer_of(client: Client) -> None:
    """Past what an operator's operations are told by."""
    while isinstance(message := client.receive(10).message, Event):
        pass
    assert isinstance(message, Result)


def test_status_says_what_the_gang_does(serving: RunningGang, client: Client) -> None:
    run_steps(client, 20)
    answer = serving.status()
    assert answer["kv"]["used_blocks"] == 2
    rates = answer["rates"]
    assert rates["steps_per_s"] > 0
    assert rates["tokens_per_s"] == pytest.approx(rates["steps_per_s"] * 22 / 20, rel=0.5)
    assert rates["sampled_per_s"] > 0
    for rank in answer["ranks"]:
        shares = rank["time_shares"]
        assert 0 < sum(shares.values()) <= 1.05, shares
        assert shares["compute"] > 0
        assert (rank["doing"], rank["graph_hit_rate"]) == ("wait for scheduler", None)
        assert rank["host_memory_bytes"] > 1 << 20
    assert answer["ranks"][1]["time_shares"]["previous_stage"] > 0


def test_status_json_is_what_the_documentation_says(serving: RunningGang) -> None:
    """Every key at every level, no more and no fewer."""
    documented = set(re.findall(r"^\| `([\w.\[\]]+)` \|", (ROOT / "docs" / "status.md").read_text(), re.MULTILINE))
    answer = serving.status()
    assert answer["kv"] is not None
    with serving.client(name="a test", timeout=10) as client:
        client.wait_ready(10)
        answer = serving.status()
    more = {"last_fault." + name for name in FAULT} | {"waiting_for[]." + name for name in WAITED}
    assert set(paths(answer)) | more == documented


WAITED = ("rank", "state", "phase", "seconds")
FAULT = ("code", "rank", "phase", "step", "message")
OPEN = ("ranks[].memory", "ranks[].memory_labels")  # their keys are the device's


def paths(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, dict) and where not in OPEN:
        for name, inner in value.items():
            path = f"{where}.{name}" if where else name
            yield path
            yield from paths(inner, path)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from paths(value[0], f"{where}[]")


def test_a_stopped_rank_is_shown_as_stopped(serving: RunningGang) -> None:
    pid = serving.rank_pid(1)
    stop(pid)
    try:
        assert serving.status()["ranks"][1]["state"] == "STOPPED"
        table = workerctl(serving.run_dir, "status", "--name", "g")
        assert table.returncode == 1, "a gang with such a rank is not ready, whatever its state"
        assert "STOPPED" in table.stdout
        stopped = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "1")
        assert (stopped.returncode, "it is stopped (SIGSTOP)" in stopped.stdout) == (1, True)
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while workerctl(serving.run_dir, "status", "--name", "g").returncode:
        assert time.monotonic() < deadline, serving.status()


def test_a_stuck_rank_is_shown_as_stuck(run_dir: Path, tmp_path: Path) -> None:
    """Its heartbeats go on; that it makes no progress is in its status file, and where it stands in its trace."""
    fault = "rank=1;at=sample;do=sleep:60"
    with gang(run_dir, tmp_path, "--device", "fake", "--step-timeout", "8", pp=2, RANKD_FAULT=fault) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt(1, [1, 2, 3], [5, 6]))
            deadline = time.monotonic() + 7
            while (seen := running.status()["ranks"][1])["state"] != "STUCK":
                assert time.monotonic() < deadline, seen
                time.sleep(0.1)
            assert (seen["phase"], seen["step"], seen["doing"]) == ("step", 1, "sample")
            table = workerctl(run_dir, "status", "--name", "g")
            assert (table.returncode, "step: sample" in table.stdout) == (1, True)
            assert "in _act" in workerctl(run_dir, "stacks", "--name", "g", "--rank", "1").stdout


def test_a_trace_has_all_parts_of_all_ranks_on_one_clock(serving: RunningGang, client: Client, tmp_path: Path) -> None:
    run_steps(client, 12)
    written = workerctl(serving.run_dir, "trace", "--name", "g", "--steps", "10", "--output", str(tmp_path / "t.json"))
    assert written.returncode == 0, written.stderr
    whole = json.loads((tmp_path / "t.json").read_text())
    spans = {(e["pid"], e["name"], e["args"]["step"]): e for e in whole["traceEvents"] if e["ph"] == "X"}
    steps = sorted({step for _, name, step in spans if name == "step"})
    assert len(steps) == 10
    parts = ("wait for scheduler", "validate", "receive", "forward", "send", "sample", "copy", "answer")
    for step in steps:
        first, last = spans[0, "step", step], spans[1, "step", step]
        assert first["args"]["tokens"] == 1
        for rank, whole_step in ((0, first), (1, last)):
            inside = [spans[rank, name, step] for name in parts[1:]]
            assert all(e["ts"] >= whole_step["ts"] - 1e-3 for e in inside)
            assert all(e["ts"] + e["dur"] <= whole_step["ts"] + whole_step["dur"] + 1e-3 for e in inside)
            assert spans[rank, "wait for scheduler", step]["ts"] <= whole_step["ts"]
        assert spans[1, "forward", step]["ts"] > spans[0, "send", step]["ts"], "hidden states go with time"
    flights = [e for e in whole["traceEvents"] if e["ph"] in "be" and e["id"] in steps]
    assert len(flights) == 20
    for begin, end in zip(flights[::2], flights[1::2], strict=True):
        assert begin["ts"] < spans[0, "step", begin["id"]]["ts"]
        assert end["ts"] > spans[1, "sample", begin["id"]]["ts"]
    assert workerctl(serving.run_dir, "trace", "--name", "nobody").returncode == 3
    assert "it must be from 1 to 4095" in workerctl(serving.run_dir, "trace", "--name", "g", "--steps", "0").stderr


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


def test_the_timeline_in_a_browser(serving: RunningGang, client: Client, tmp_path: Path) -> None:
    """What its script makes of it, after a click; and that it asks for nothing from anywhere."""
    run_steps(client, 12)
    output = str(tmp_path / "t.html")
    drawn = workerctl(serving.run_dir, "timeline", "--name", "g", "--steps", "10", "--output", output)
    assert drawn.returncode == 0, drawn.stderr
    text = (tmp_path / "t.html").read_text()
    assert not re.search(r"https?://|src=|{{", text)
    said = drawn.stdout.splitlines()
    share = r"[\d.]+%"
    sums = rf"at work {share}, bubbles {share} \(previous stage {share}, scheduler {share}\)"
    assert re.fullmatch(f"rank 0: {sums}", said[0])
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser: install Debian's chromium to look at the page in one")
    look = """<script>document.getElementById("in").click(); document.body.dataset.found = JSON.stringify({
      steps: [...document.querySelectorAll(".step")].map(box => box.textContent),
      bubbles: [...document.querySelectorAll(".row .receive, .row .wait-for-scheduler")]
        .filter(box => box.offsetHeight > 30).length,
      outside: [...document.querySelectorAll(".step")]
        .filter(box => box.getBoundingClientRect().width < 0.01).length,
      ticks: document.querySelectorAll("#axis span").length, zoom: document.getElementById("canvas").style.width,
      sums: [...document.querySelectorAll("#sums li")].map(item => item.textContent)})</script></body>"""
    (tmp_path / "looked.html").write_text(text.replace("</body>", look))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", (tmp_path / "looked.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr, shown.stderr
    (found,) = re.findall(r'data-found="([^"]*)"', shown.stdout)
    seen = json.loads(html.unescape(found))
    assert len(seen["steps"]) == 20
    assert len(set(seen["steps"])) == 10
    assert seen["bubbles"] >= 20, "each step of each rank was waited for"
    assert (seen["outside"], seen["zoom"], seen["sums"]) == (0, "160%", said[:2])
    assert seen["ticks"] > 3


def fetch(gang: RunningGang, path: str, method: str = "GET") -> tuple[int, str]:
    (address,) = re.findall(r"metrics: (http://127\.0\.0\.1:\d+)/metrics", gang.said)
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, method=method), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(seen: dict[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
    return sum(value for has, value in seen[name] if labels.items() <= has.items())


def refused(seen: dict[str, list[tuple[dict[str, str], float]]]) -> float:
    """By every rank: they need not be equally far."""
    return min(total(seen, "rankd_steps_total", rank=rank, outcome="refused") for rank in "01")


def test_metrics_count_every_step(serving: RunningGang, client: Client) -> None:
    before = samples(fetch(serving, "/metrics")[1])
    run_steps(client, 15)
    client.submit(decode(77, 0))  # of nobody
    assert isinstance(client.receive(10).message, Refused)
    deadline = time.monotonic() + 10
    while (after := samples(fetch(serving, "/metrics")[1])) and not refused(after) - refused(before):
        assert time.monotonic() < deadline, after

    def more(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert more("rankd_steps_total", rank="1", outcome="done") == 15
    assert more("rankd_tokens_total", rank="0") == 17
    assert more("rankd_sampled_tokens_total", rank="1") == 15
    forward = {"rank": "0", "phase": "forward"}
    assert more("rankd_step_seconds_count", rank="0") == more("rankd_step_phase_seconds_count", **forward)
    assert more("rankd_step_seconds_bucket", rank="0", le="+Inf") == 15
    assert more("rankd_step_tokens_bucket", rank="0", le="1.0") == 14, "the prompt has more"
    assert more("rankd_step_seconds_sum", rank="0") > more("rankd_step_phase_seconds_sum", **forward) > 0
    assert more("rankd_step_latency_seconds_count") >= 16
    assert more("rankd_step_queue_seconds_count") >= 15
    assert more("rankd_step_queue_seconds_sum") < more("rankd_step_latency_seconds_sum")
    assert after["rankd_kv_blocks_used"] == [({}, 2.0)]
    assert after["rankd_gang_info"][0][0]["architecture"] == "LlamaForCausalLM"
    assert ({"state": "READY"}, 1.0) in after["rankd_gang_state"]


def test_probes(serving: RunningGang) -> None:
    assert fetch(serving, "/healthz") == (200, "alive\n")
    assert fetch(serving, "/healthz", "HEAD") == (200, "")
    assert fetch(serving, "/readyz") == (200, "READY\n")
    assert fetch(serving, "/else")[0] == 404
    pid = serving.rank_pid(0)
    stop(pid)
    try:
        assert fetch(serving, "/readyz") == (503, "rank 0 is STOPPED\n")
        assert fetch(serving, "/healthz")[0] == 200, "alive, and making progress, are two facts"
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while fetch(serving, "/readyz")[0] != 200:
        assert time.monotonic() < deadline


def test_a_port_in_use_is_refused_before_anything_is_spawned(serving: RunningGang, tmp_path: Path) -> None:
    (port,) = re.findall(r"metrics: http://127\.0\.0\.1:(\d+)/", serving.said)
    with gang(serving.run_dir, tmp_path, "--metrics-port", port, name="second") as second:
        assert second.wait_exit() == 78
        (line,) = second.errors()
        assert line == f"--metrics-port {port} of 127.0.0.1 cannot be had: Address already in use"
        second.wait_nothing_left()


def test_dashboard_and_alerts_and_the_page_name_metrics_that_exist(serving: RunningGang) -> None:
    text = fetch(serving, "/metrics")[1]
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    there = set(families) | set(samples(text))
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in alerts)
    for query in queries + [rule["expr"] for rule in alerts]:
        used = set(re.findall(r"\brankd_\w+", query))
        assert used, query
        assert used <= there, query
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(rankd_\w+)` \|", page, re.MULTILINE))
    typed = {name + "_total" if kind == "counter" else name for name, kind in families.items()}
    assert documented == typed


def test_a_profile_is_a_file_a_rank_and_ends_by_itself(serving: RunningGang, client: Client) -> None:
    run = ["profile", "start", "--name", "g", "--steps"]
    none = workerctl(serving.run_dir, "profile", "stop", "--name", "g")
    assert (none.returncode, "no profile was started" in none.stderr) == (1, True)
    assert workerctl(serving.run_dir, *run, "3").returncode == 0
    run_steps(client, 6)  # more than it takes
    stopped = workerctl(serving.run_dir, "profile", "stop", "--name", "g")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    folder = serving.run_dir / "_logs" / "g" / "profile1"
    assert stopped.stdout.splitlines() == [str(folder / f"rank{rank}.json.gz") for rank in (0, 1)]
    for path in stopped.stdout.splitlines():
        with gzip.open(path, "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert {name for name in names if name.startswith("rankd step")} == {f"rankd step {n}" for n in (1, 2, 3)}
        assert any(name.startswith("aten::") for name in names)
    for _ in range(2):  # ended before any step, twice
        assert workerctl(serving.run_dir, *run, "1000").returncode == 0
        again = workerctl(serving.run_dir, *run, "5")
        assert (again.returncode, "a profile runs already" in again.stderr) == (1, True)
        assert workerctl(serving.run_dir, "profile", "stop", "--name", "g").returncode == 0
    wrong = workerctl(serving.run_dir, *run, "1001")
    assert "--steps: it is 1001, it must be from 1 to 1000" in wrong.stderr
    client.submit(decode(1, 8))
    answer_of(client)


async def test_top_shows_ranks_pipeline_memory_events_and_logs(serving: RunningGang, client: Client) -> None:
    run_steps(client, 8)
    app = TopApp(RunFiles("g", serving.environment), serving.run_dir / "_logs" / "g", 0.1)
    async with app.run_test(size=(160, 50)) as pilot:
        deadline = time.monotonic() + 10
        while not (ranks := app.query_one("#ranks", DataTable)).row_count:
            assert time.monotonic() < deadline
            await pilot.pause(0.05)
        assert ranks.row_count == 2
        heading, pipeline, memory = (str(app.query_one(name).render()) for name in ("#heading", "#pipeline", "#memory"))
        assert heading.startswith("g  READY")
        # Which rank's parts are long enough for a box of their own is the machine's to say.
        assert re.search(r"rank 0 .*\nrank 1 ", pipeline), pipeline
        assert re.search("[█·]", pipeline.rpartition("\n")[0]), pipeline
        assert "MiB" in memory
        events = "\n".join(strip.text for strip in app.query_one("#events", RichLog).lines)
        assert "the gang is READY, epoch 1" in events
        logs = "\n".join(strip.text for strip in app.query_one("#logs", RichLog).lines)
        assert "rank 1 pp 1 tp 0 epoch 1" in logs
        await pilot.press("q")
    assert app.return_code == 0

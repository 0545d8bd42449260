"""What operators copy: commands that exist, probes, a job script that ends in time, alerts that page in need alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gang.gangs import ROOT
from worker.ctl.commands import COMMANDS
from worker.ctl.completion import options_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATORS = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The page's first block of code in that language."""
    found = re.search(rf"^```{language}\n(.*?)^```", OPERATORS, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "alerts.yml"], ids=lambda page: page.name)
def test_commands_in_documents_exist(page: Path) -> None:
    """In code only: subcommand and options, whatever stands for their values."""
    text = page.read_text(encoding="utf-8").replace("workerctl, ", "workerctl ")
    commands = re.findall(r"(?<![\w-])workerctl ([a-z][^`\n#|;&>)]*)", text)
    for command in commands:
        name, *words = command.replace(",", " ").split()
        if name not in COMMANDS:
            assert f"`workerctl {name}" not in text, command  # prose, such as "workerctl starts"
            continue
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= {*options_of(name), "-h"}, command


def test_every_probe_has_time_for_an_answer() -> None:
    pod: dict[str, Any] = yaml.safe_load(block("yaml"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: value for name, value in container.items() if name.endswith("Probe")}
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {probe["timeoutSeconds"] for probe in probes.values()} == {5}


def test_the_unit_is_one(tmp_path: Path) -> None:
    """And of several gangs, none takes away what the others share, or has their port."""
    unit = block("ini")
    assert "RuntimeDirectoryPreserve=yes" in unit
    assert "--metrics-port" not in re.sub("^#.*", "", unit, flags=re.MULTILINE)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: install Debian's systemd to have the unit verified")
    path = tmp_path / "rankd@.service"
    path.write_text(unit.replace("/opt/rankd/bin/workerctl", "/bin/true").replace("User=rankd", "User=root"))
    seen = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert str(path.name) not in seen.stderr, seen.stderr


STUB = """#!/bin/bash
echo "$@" >> calls
case $1 in
  up) until [[ -e down ]]; do sleep 0.05; done ;;
  down) touch down ;;
esac
"""


def test_a_job_that_is_told_to_end_has_its_gang_end_at_once(tmp_path: Path) -> None:
    """While its scheduler would go on for a minute."""
    (tmp_path / "workerctl").write_text(STUB)
    (tmp_path / "my-scheduler").write_text("#!/bin/bash\necho $$ > started\nmv started scheduler\nexec sleep 60\n")
    for name in ("workerctl", "my-scheduler"):
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "SLURM_JOB_ID": "7", "MODEL": "m", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job = subprocess.Popen(["bash", "-c", block("bash")], env=variables, cwd=tmp_path)
    try:
        deadline = 30.0
        while not (tmp_path / "scheduler").exists():
            deadline -= 0.05
            assert deadline > 0
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(0.05)
        job.send_signal(signal.SIGTERM)
        job.wait(30)
        calls = (tmp_path / "calls").read_text().splitlines()
        assert calls.count("down --name job") == 2, "by the trap, and at the script's own end"
    finally:
        job.kill()
        job.wait(10)
        if (tmp_path / "scheduler").exists():
            os.kill(int((tmp_path / "scheduler").read_text()), signal.SIGKILL)


ALERTS = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'up{job="rankd", instance="a"}', values: '1x60'}
      - {series: 'up{job="rankd", instance="gone"}', values: '1x20 0x40'}
      - {series: 'rankd_gang_info{job="rankd", instance="a"}', values: '1x60'}
      - {series: 'rankd_gang_state{job="rankd", instance="a", state="READY"}', values: '1x20 0x40'}
      - {series: 'rankd_gang_state{job="rankd", instance="a", state="ASLEEP"}', values: '0x20 1x20 0x20'}
      - {series: 'rankd_gang_state{job="rankd", instance="a", state="LOADING"}', values: '0x40 1x20'}
    alert_rule_test:
      - {eval_time: 39m, alertname: RankdNotReady, exp_alerts: []}
      - eval_time: 55m
        alertname: RankdNotReady
        exp_alerts:
          - exp_labels: {severity: page, job: rankd, instance: a}
            exp_annotations: {summary: Gang a is not READY, description: "said of RankdNotReady"}
      - {eval_time: 19m, alertname: RankdGone, exp_alerts: []}
      - eval_time: 40m
        alertname: RankdGone
        exp_alerts:
          - exp_labels: {severity: page, job: rankd, instance: gone}
            exp_annotations: {summary: Gang gone does not answer the scrape, description: "said of RankdGone"}
"""


def test_a_gang_that_sleeps_pages_nobody(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here: install Debian's prometheus to have the alerts evaluated")
    path, text = ROOT / "docs" / "alerts.yml", ALERTS
    for rule in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"][0]["rules"]:
        text = text.replace(f"said of {rule['alert']}", rule["annotations"]["description"])
    (tmp_path / "test.yml").write_text(text.replace("RULES", str(path)))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

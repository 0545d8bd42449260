"""The subcommands of workerctl, without importing any.

Whoever asks for --help, or presses the tab key, waits for what a command's module imports. So it holds the parser, and
what only the work needs (numpy, zmq, a client) is imported by its function, once there is work to do.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """`worker.ctl.<module>.<function>(arguments, environment)` returns the exit code."""

    module: str
    function: str
    does: str
    example: str


COMMANDS = {
    "doctor": Command("doctor", "doctor", "check before a start", "workerctl doctor --model DIR -tp 2"),
    "plan": Command("plan", "plan", "would a model fit", "workerctl plan --model DIR --gpu-memory 141GB"),
    "up": Command("up", "up", "start a gang", "workerctl up --model DIR -tp 1 -pp 2 --name demo --detach"),
    "status": Command("status", "show", "show a gang", "workerctl status --name demo --watch"),
    "top": Command("top", "top", "a live view of a gang", "workerctl top --name demo"),
    "memory": Command("memory", "memory", "where each rank's memory went", "workerctl memory --name demo"),
    "stacks": Command("stacks", "stacks", "stacks of every thread of every rank", "workerctl stacks --name demo"),
    "trace": Command("trace", "trace", "the last steps for Perfetto", "workerctl trace --output trace.json"),
    "timeline": Command(
        "timeline", "timeline", "the last steps as a page, bubbles summed", "workerctl timeline --steps 50"
    ),
    "profile": Command("profile", "profile", "torch's profiler on every rank", "workerctl profile start --steps 20"),
    "replay": Command("replay", "replay", "feed a recording to a gang", "workerctl replay steps.rec --name demo"),
    "logs": Command("logs", "logs", "what its processes log", "workerctl logs --name demo --rank 1 -f"),
    "log-level": Command("log_level", "log_level", "log more, or less", "workerctl log-level debug --name demo"),
    "sleep": Command("sleep", "sleep", "give device memory back", "workerctl sleep --name demo --level 1"),
    "wake": Command("sleep", "wake", "take device memory again", "workerctl wake --name demo"),
    "report": Command("report", "report", "bundle the reports of failures", "workerctl report --name demo"),
    "down": Command("down", "down", "end a gang", "workerctl down --name demo"),
    "drain": Command("down", "drain", "end a gang in its step stream", "workerctl drain --name demo"),
    "keys": Command("keys", "keys", "keys for schedulers over tcp", "workerctl keys --dir keys --client laptop"),
    "completion": Command(
        "completion", "completion", "for the tab key of your shell", 'eval "$(workerctl completion bash)"'
    ),
    "conformance": Command(
        "conformance",
        "conformance",
        "hold a gang, or a scheduler, to the wire's spec",
        "workerctl conformance --name demo",
    ),
}

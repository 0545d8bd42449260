"""Whether a gang is well, from the object of `workerctl status --json`: for exit codes and for probes."""

from __future__ import annotations

from typing import Any

READY, NOT_READY, FAILED = 0, 1, 2


def health(answer: dict[str, Any]) -> tuple[int, str]:
    """READY, NOT_READY or FAILED, and why in a few words. READY also means that every rank makes progress."""
    if answer["state"] == "FAILED":
        fault = answer["last_fault"]
        return FAILED, f"FAILED: {fault['message']}" if fault else "FAILED"
    if answer["state"] != "READY":
        return NOT_READY, answer["state"]
    for rank in answer["ranks"]:
        if rank["state"] != "READY":
            return NOT_READY, f"rank {rank['rank']} is {rank['state']}"
    return READY, "READY"

"""`workerctl doctor`: what would stop a gang, or make it slow, before one is started; and what to change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.ctl.checks import Finding, host_checks, model_checks, torch_checks
from worker.ctl.plan import add_sizes, device_bytes
from worker.options import DEVICES, Parser, whole
from workerproto.rundir import DEFAULT_NAME

_BAD = 1
_MARKS = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


def doctor(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 if nothing would stop a gang; 1 if something would."""
    parser = Parser(
        "workerctl doctor",
        "Check devices, drivers, libraries, shared memory, limits, ports and the model folder before a start, and say "
        "what to change.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="checked too: architecture, files, size")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--tensor-parallel-size", "-tp", type=whole(1), default=1, metavar="T")
    parser.add_argument("--pipeline-parallel-size", "-pp", type=whole(1), default=1, metavar="P")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--metrics-port", type=whole(0, (1 << 16) - 1), metavar="PORT", help="whether it can be had")
    parser.add_argument("--gpu-memory", type=device_bytes, metavar="BYTES", help="instead of what torch finds")
    parser.add_argument("--quick", action="store_true", help="leave torch out, which takes seconds to import")
    add_sizes(parser)
    parser.add_argument("--json", action="store_true", help="an array of objects: check, verdict, found, advice")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    findings: list[Finding] = host_checks(options.name, ranks, options.metrics_port, environment)
    memory = options.gpu_memory
    if not options.quick:
        found, device_memory = torch_checks(ranks, options.device)
        findings += found
        memory = memory or device_memory
    if options.model is not None:
        findings += model_checks(options, memory)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            print(f"{_MARKS[finding.verdict]}  {finding.check:<{width}}  {finding.found}")
            if finding.advice:
                print(f"      {'':<{width}}  -> {finding.advice}")
    return _BAD if any(finding.verdict == "bad" for finding in findings) else 0

"""Prometheus metrics of a gang, and the probes of an orchestrator, on an http port that is opened only if asked for.

Names and units by https://prometheus.io/docs/practices/naming/; docs/metrics.md lists them.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker import VERSION as RANKD
from worker.coordinator.observed import Histogram, Observed
from worker.exit_codes import ExitCode
from worker.health import READY, health
from workerproto.states import Gang as GangState

PATIENCE_S = 2.0
"""For the coordinator's main loop to answer: if it does not, the probe of life fails, as it should."""


class Metrics:
    """`status` gives the object of `workerctl status --json`; `observed` is up to date when it is called."""

    def __init__(self, observed: Observed, status: Callable[[], dict[str, Any]]) -> None:
        self.faults: Counter[int] = Counter()  # by exit code
        self.restarts = 0
        self._observed = observed
        self._status = status
        self._started = time.time()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return exposition.generate_latest(self._registry)

    def ready(self) -> tuple[bool, str]:
        code, why = health(self._status())
        return code == READY, why

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        answer = self._status()
        yield from _of_gang(answer, self._started)
        faults = CounterMetricFamily("rankd_faults", "Failures of the gang by exit code.", labels=["code"])
        for code in ExitCode:  # the zeros too, or the first of a kind would be no increase
            if code is not ExitCode.OK:
                faults.add_metric([str(int(code))], self.faults[code])
        yield faults
        yield CounterMetricFamily("rankd_restarts", "Restarts of the gang by its coordinator.", value=self.restarts)
        yield from _of_ranks(answer["ranks"])
        yield from _of_steps(self._observed)


def _of_gang(answer: dict[str, Any], started: float) -> Iterator[Metric]:
    model, parallel = answer["model"], answer["parallel"]
    info = {
        "name": answer["name"], "version": RANKD, "architecture": model["architecture"],
        "dtype": model["dtype"], "tp": str(parallel["tp"]), "pp": str(parallel["pp"]),
    }  # fmt: skip
    yield _labelled("rankd_gang_info", "What runs here.", {tuple(info.values()): 1}, list(info))
    states = {(str(state),): float(state == answer["state"]) for state in GangState}
    yield _labelled("rankd_gang_state", "1 for the state the gang is in.", states, ["state"])
    gauges = {
        "rankd_gang_start_time_seconds": ("When this coordinator began, in unix time.", started),
        "rankd_gang_epoch": ("Incarnation of the gang.", answer["epoch"]),
        "rankd_requests": ("Requests that live: running or preempted.", answer["requests_live"]),
        "rankd_steps_in_flight": ("Steps sent to ranks and not answered.", answer["steps_in_flight"]),
        "rankd_scheduler_attached": ("Whether a scheduler holds the lease.", answer["scheduler"] is not None),
    }
    if kv := answer["kv"]:
        gauges["rankd_kv_blocks"] = "Blocks of KV cache of each rank.", kv["num_blocks"]
        gauges["rankd_kv_blocks_used"] = "Blocks of KV cache that requests hold.", kv["used_blocks"]
    for name, (help_text, value) in gauges.items():
        yield GaugeMetricFamily(name, help_text, value=float(value))


def _of_ranks(ranks: list[dict[str, Any]]) -> Iterator[Metric]:
    def by_rank(name: str, help_text: str, key: str) -> Metric:
        known = {(str(rank["rank"]),): float(rank[key]) for rank in ranks if rank[key] is not None}
        return _labelled(name, help_text, known, ["rank"])

    states = {(str(rank["rank"]), rank["state"]): 1.0 for rank in ranks}
    yield _labelled("rankd_rank_state", "1 for the state the rank is in.", states, ["rank", "state"])
    yield by_rank("rankd_rank_phase_seconds", "Since the rank entered its phase.", "phase_s")
    yield by_rank("rankd_rank_heartbeat_age_seconds", "Since the rank was heard last.", "heartbeat_age_s")
    yield by_rank("rankd_rank_kv_bytes", "KV cache of the rank.", "kv_bytes")
    yield by_rank("rankd_rank_resident_memory_bytes", "Resident set of the rank's process.", "host_memory_bytes")
    ledger = {
        (str(rank["rank"]), line): float(size)
        for rank in ranks for line, size in rank["memory"].items() if isinstance(size, int | float)
    }  # fmt: skip
    yield _labelled("rankd_rank_memory_bytes", "The memory ledger of the rank's device.", ledger, ["rank", "line"])


def _of_steps(observed: Observed) -> Iterator[Metric]:
    steps = CounterMetricFamily("rankd_steps", "Steps by outcome.", labels=["rank", "outcome"])
    tokens = CounterMetricFamily("rankd_tokens", "Tokens computed, prompts included.", labels=["rank"])
    sampled = CounterMetricFamily("rankd_sampled_tokens", "Tokens sampled.", labels=["rank"])
    graphs = CounterMetricFamily("rankd_graph_steps", "Steps that replayed a captured graph.", labels=["rank"])
    missed = CounterMetricFamily("rankd_step_records_missed", "Steps too many to be in these metrics.", labels=["rank"])
    whole = HistogramMetricFamily("rankd_step_seconds", "A step on a rank, from its receipt.", labels=["rank"])
    device = HistogramMetricFamily("rankd_step_device_seconds", "A step on the device.", labels=["rank"])
    parts = HistogramMetricFamily("rankd_step_phase_seconds", "What a step consists of.", labels=["rank", "phase"])
    size = HistogramMetricFamily("rankd_step_tokens", "Tokens of a step.", labels=["rank"])
    for number, seen in enumerate(observed.ranks):
        rank = str(number)
        for outcome in ("done", "refused"):
            steps.add_metric([rank, outcome], seen.steps[outcome])
        counted = ((tokens, seen.tokens), (sampled, seen.sampled), (graphs, seen.graphs), (missed, seen.missed))
        for family, value in counted:
            family.add_metric([rank], value)
        for histogram, values in ((whole, seen.whole), (device, seen.device), (size, seen.step_tokens)):
            histogram.add_metric([rank], values.buckets, values.sum)
        for phase, values in seen.parts.items():
            parts.add_metric([rank, phase], values.buckets, values.sum)
    yield from (steps, tokens, sampled, graphs, missed, whole, device, parts, size)
    yield _histogram("rankd_step_latency_seconds", "From a step's arrival to its answer.", observed.latency)
    yield _histogram("rankd_step_queue_seconds", "From a step's arrival to its receipt by rank 0.", observed.queue)


def _histogram(name: str, help_text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(name, help_text, buckets=values.buckets, sum_value=values.sum)


def _labelled(name: str, help_text: str, values: dict[Any, float], labels: list[str]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


class Server:
    """Threads of its own; every answer is computed on the coordinator's loop. Raises OSError: no such port."""

    def __init__(self, host: str, port: int, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        def on_loop(call: Callable[[], Any]) -> Any:
            answer: Future[Any] = Future()
            loop.call_soon_threadsafe(lambda: answer.set_result(_attempt(call)))
            result = answer.result(PATIENCE_S)
            if isinstance(result, Exception):
                raise result
            return result

        class Handler(BaseHTTPRequestHandler):
            timeout = 5  # a stranger that says nothing

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                try:
                    match self.path.partition("?")[0]:
                        case "/metrics":
                            self._send(200, on_loop(metrics.text), exposition.CONTENT_TYPE_LATEST)
                        case "/healthz":
                            on_loop(lambda: None)
                            self._send(200, b"alive\n")
                        case "/readyz":
                            ready, why = on_loop(metrics.ready)
                            self._send(200 if ready else 503, f"{why}\n".encode())
                        case _:
                            self._send(404, b"there are /metrics, /healthz and /readyz\n")
                except TimeoutError:
                    self._send(503, f"the coordinator does not answer within {PATIENCE_S:g} s\n".encode())

            def _send(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":  # as some load balancers ask
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A probe every second is no news."""

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # of 5: a burst would wait a second for its SYN to be sent again
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Listener((host, port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error

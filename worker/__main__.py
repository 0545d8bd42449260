"""One rank: `python -m worker`, started by torchrun or by `workerctl up`, with the same options."""

from __future__ import annotations

try:
    import os
    import sys
    import time
    from typing import TYPE_CHECKING, NoReturn, TextIO

    from worker.exit_codes import ExitCode, Failure
    from worker.logs import log_to, log_to_terminal
    from worker.processes import die_when_asked, die_with_parent, parent_identity, refuse_core_dumps
    from worker.rank.stacks import offer as offer_stacks
except KeyboardInterrupt:  # Ctrl-C so early: no traceback of imports
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from worker.config import GangConfig
    from worker.rank.place import Place
    from worker.run_files import RunFiles


def main() -> NoReturn:
    # First of all, since in the time that imports take, Ctrl-C may be pressed and a launcher killed: from then on the
    # parent is whoever reaps orphans.
    environment = os.environ
    die_when_asked()
    if environment.get("LOCAL_RANK", "0") != "0":
        die_with_parent()  # not the first rank of a host: someone has to sweep up
    parent = parent_identity()
    refuse_core_dumps()
    offer_stacks()

    from worker.config import resolve
    from worker.options import Parser, add_gang_options
    from worker.rank.place import Place, origin_of
    from worker.run_files import RunFiles, sweep

    parser = Parser("python -m worker", "One rank of a gang; a launcher starts as many as tp x pp.")
    add_gang_options(parser)
    options = parser.parse_args()
    trace = options.traceback or environment.get("RANKD_TRACEBACK") == "1"
    try:
        place = Place.from_environment(environment, parent)
    except (ValueError, Failure) as error:
        leave(getattr(error, "code", ExitCode.USAGE), str(error), error if trace else None)
    files: RunFiles | None = None
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)  # it may become a file
    try:
        config = resolve(options, environment)
        check_world_size(config, place)
        if config.restarts.most and not place.spawned:
            raise ValueError("--max-restarts is given to the worker, but torchrun restarts: give it to torchrun")
        origin = origin_of(config, place)
        if place.spawned:  # by a coordinator that holds the name; what another gang has there is not touched
            log_to(config.observe.log_file(place.rank), origin, config.observe, terminal, everything=True)
        else:
            log_to_terminal(origin, config.observe, terminal)  # until a coordinator says Welcome
        files = RunFiles(config.name, environment, place.launch, place.epoch)
        code = run_rank(config, place, files, terminal, trace)
        message, traced = "", None
    except (ValueError, Failure) as error:
        if place.local_rank and not place.spawned:
            time.sleep(2)  # all ranks find the same: let the first say it before torchrun ends us all
        code = getattr(error, "code", ExitCode.BAD_CONFIG)
        if place.spawned:  # as when config.json has changed since: by a coordinator that is there to tell it
            tell_of(error, RunFiles(options.name, environment, place.launch, place.epoch), place, trace)
            message, traced = "", None
        else:
            message, traced = "" if place.local_rank > 0 else str(error), error if trace else None
    if files is not None and code is ExitCode.LIMIT:
        sweep(files)  # there may be no coordinator that could
    leave(code, message, traced, terminal)


def run_rank(config: GangConfig, place: Place, files: RunFiles, terminal: TextIO, trace: bool) -> ExitCode:
    """Raises ValueError, or Failure if the coordinator could not be started."""
    from worker.config import threads_of
    from worker.rank.ahead import Ahead
    from worker.rank.coordinator_start import start_coordinator
    from worker.rank.fault_points import FaultPoints
    from worker.rank.parent_watch import ParentWatch
    from worker.rank.place import limit_threads
    from worker.rank.process import run

    fault_points = FaultPoints(os.environ.get("RANKD_FAULT", ""), place.rank, place.epoch)
    limit_threads(threads_of(config, place.local_world_size))
    device = config.device_number(place.local_rank)
    ahead = None if device is None else Ahead(device)
    watch = ParentWatch(files)
    watch.add(place.parent, place.parent_started, "the launcher")
    if not place.spawned and place.local_rank == 0:
        coordinator = start_coordinator(place, sys.argv[1:])
        watch.add_child(coordinator, "the coordinator")
    return run(config, place, files, watch, fault_points, terminal, ahead, trace=trace)


def tell_of(error: ValueError | Failure, files: RunFiles, place: Place, trace: bool) -> None:
    from worker.rank.control import tell
    from worker.rank.faults import describe

    tell(files.control_endpoint(place.rank), describe(error, "boot", None, always_trace=trace))


def check_world_size(config: GangConfig, place: Place) -> None:
    if place.world_size != place.local_world_size:
        raise ValueError(
            f"{place.local_world_size} of {place.world_size} ranks are on this host: a gang over several hosts is not "
            "built yet"
        )
    if config.world_size != place.world_size:
        raise ValueError(
            f"-tp {config.tp} x -pp {config.pp} = {config.world_size} ranks, but the launcher started "
            f"{place.world_size} (WORLD_SIZE); start it with --nproc-per-node {config.world_size}"
        )


def leave(
    code: ExitCode, message: str = "", traced: BaseException | None = None, terminal: TextIO = sys.stderr
) -> NoReturn:
    """Without the interpreter's own end, which waits for threads that may be stuck in torch."""
    if traced is not None:
        import traceback

        traceback.print_exception(traced, file=terminal)
    if message:
        print(f"rankd: error: {message}", file=terminal)
    terminal.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

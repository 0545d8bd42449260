"""A coordinator that nobody waits for: started by the first rank under torchrun, or by `workerctl up --detach`.

    python -m worker.coordinator [its own options] -- [options of the gang]

stdout is for the starter: `up` once connections are taken, `ready` at READY. stdin without --agent is a pipe from it,
which tells by its end that the starter is gone.
"""

from __future__ import annotations

try:
    import argparse
    import os
    import sys

    from worker.config import resolve
    from worker.coordinator.incarnation import Launch
    from worker.coordinator.run import run
    from worker.exit_codes import ExitCode, Failure
    from worker.options import Parser, add_gang_options
    from worker.os_errors import told
    from worker.processes import refuse_core_dumps
except KeyboardInterrupt:  # Ctrl-C so early: no traceback of imports
    raise SystemExit(130) from None


def main() -> int:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, arguments = _own_options().parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    parser = Parser("python -m worker.coordinator", "Started by workerctl or by a rank, not by hand.")
    add_gang_options(parser)
    options = parser.parse_args(arguments)
    refuse_core_dumps()

    def tell(word: str) -> None:
        try:
            os.write(1, f"{word}\n".encode())
        except OSError:
            pass  # the starter has heard enough, and gone on

    try:
        config = resolve(options, os.environ)
        with open(own.log_file, "ab") as log:

            def ready() -> None:
                tell("ready")
                if own.agent is None:  # the terminal that started us goes on without us
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)

            launch = Launch(
                arguments, dict(os.environ), own.launch, own.epoch, own.agent, log,
                starter=0 if own.agent is None else None, up=lambda: tell("up"), ready=ready,
            )  # fmt: skip
            return run(config, launch)
    except (ValueError, OSError, Failure) as error:
        if options.traceback:
            raise
        print(f"rankd: error: {told(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return getattr(error, "code", ExitCode.BAD_CONFIG)


def _own_options() -> Parser:
    parser = Parser("python -m worker.coordinator", "The part before --.")
    parser.add_argument("--launch", required=True, help="name of this launch, alike on all ranks")
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--agent", type=_agent, help="PID:START of the torchrun whose ranks are adopted")
    parser.add_argument("--log-file", default=os.devnull, help="for what ranks print, and all that is said after READY")
    return parser


def _agent(text: str) -> tuple[int, int]:
    pid, _, started = text.partition(":")
    if not (pid.isdigit() and started.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not PID:START")
    return int(pid), int(started)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before `run`, which ends in order
        sys.exit(130)

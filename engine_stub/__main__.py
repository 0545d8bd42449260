"""python -m engine_stub generate|bench: use a gang that runs."""

from __future__ import annotations

try:
    import argparse
    import os
    import sys
    from pathlib import Path

    from engine_stub import bench, generate
    from engine_stub.engine import StepRejected
    from workerproto.client import Client
    from workerproto.curve import CurveKeys
    from workerproto.rundir import DEFAULT_NAME, endpoint_of
except KeyboardInterrupt:  # Ctrl-C so early: no traceback of imports
    raise SystemExit(130) from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine_stub", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", default=DEFAULT_NAME, help=f"of the gang (default: {DEFAULT_NAME})")
    common.add_argument("--endpoint", help="of the gang, instead of its name")
    common.add_argument("--server-key", type=Path, metavar="FILE", help="over tcp: the gang's public key, server.key")
    common.add_argument("--client-key", type=Path, metavar="FILE", help="over tcp: this client's NAME.key_secret")
    common.add_argument("--takeover", action="store_true", help="end the lease of whoever drives it")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in (("generate", generate), ("bench", bench)):
        command = commands.add_parser(name, parents=[common], help=(module.__doc__ or "").split("\n")[0])
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    if (args.server_key is None) != (args.client_key is None):
        parser.error("--server-key and --client-key go together")
    try:
        endpoint = args.endpoint or endpoint_of(args.name, os.environ)
        keys = CurveKeys.read(args.server_key, args.client_key) if args.server_key else None
        with Client(endpoint, name=f"engine_stub {args.command}", takeover=args.takeover, keys=keys) as client:
            args.run(args, client)
        print(end="", flush=True)  # here, where it is told if there is no room for it
    except BrokenPipeError:  # whoever read it has seen enough
        _drop_output()
    except (OSError, ValueError, StepRejected) as error:
        if os.environ.get("RANKD_TRACEBACK"):
            raise
        _drop_output()
        sys.exit(f"engine_stub: error: {error}")


def _drop_output() -> None:
    """If it takes nothing more: what is left for it could only fail again, at the interpreter's end."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

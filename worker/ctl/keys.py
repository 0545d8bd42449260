"""`workerctl keys`: keys for connections over tcp, in one folder that the gang is given.

    DIR/server.key_secret        the gang's own pair; stays with it
    DIR/server.key               its public key, for every scheduler
    DIR/clients/NAME.key         who may connect; a file that is taken away ends that from the next connection on
    DIR/NAME.key_secret          the scheduler's own pair; goes to it, and need not stay here
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.exit_codes import ExitCode
from worker.listen import CLIENTS, SERVER
from worker.options import Parser
from workerproto.rundir import is_name


def keys(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 once the pairs are there; one that is there already is left as it is. Raises ValueError."""
    parser = Parser("workerctl keys", "Make keys for connections over tcp: the gang's, and one for each scheduler.")
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR", help="where they lie; made if need be")
    parser.add_argument("--client", action="append", metavar="NAME", help="a scheduler (default: client)")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    names = options.client or ["client"]
    for name in names:
        if not is_name(name) or name == SERVER:
            raise ValueError(f"--client is {name!r}, it must be a name of letters and digits, and not {SERVER!r}")
    from zmq.auth import create_certificates

    mask = os.umask(0o077)  # secret from the first byte on
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
        (options.dir / CLIENTS).mkdir(exist_ok=True)
        for name in (SERVER, *names):
            secret, public = options.dir / f"{name}.key_secret", options.dir / f"{name}.key"
            allowed = options.dir / CLIENTS / public.name
            if secret.exists() or allowed.exists():
                print(f"{secret}: is there already", file=sys.stderr)
                continue
            create_certificates(options.dir, name)
            if name != SERVER:
                public.rename(allowed)
            print(secret)
    except OSError as error:
        raise ValueError(f"keys cannot be made in {options.dir}: {error.strerror}") from None
    finally:
        os.umask(mask)
    return ExitCode.OK

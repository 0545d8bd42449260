"""A scheduler in mid-stream learns of an orderly stop by the gang's Bye, whatever it had sent by then."""

import os
import signal
from pathlib import Path

import pytest

from engine_stub.engine import Engine
from engine_stub.request import Params
from tests.gang.gangs import gang
from workerproto.client import LeaseLost


def test_a_stop_in_mid_stream_ends_in_bye(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, pp=2) as running:
        running.wait_ready()
        with running.client() as client:

            def stop(_: int, token: int) -> None:
                if len(streamed) == 3:
                    os.kill(running.pid, signal.SIGTERM)
                streamed.append(token)

            streamed: list[int] = []
            with pytest.raises(LeaseLost, match="the gang has stopped"):
                Engine(client).generate([[1, 2, 3], [4, 5]], Params(200), stop)
        assert running.wait_exit() == 0
        running.wait_nothing_left()

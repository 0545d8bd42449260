"""What torchrun does for ranks, without torch: `python plain_launcher.py JSON`, a list of [rank, [arguments]].

It waits for all of them and prints how each ended. $FAKE_DEVICE: what each says at roll-call that it has.
"""

import json
import os
import subprocess
import sys

WITH_DEVICE = """
import os
from worker.__main__ import main
from worker.rank.seat import Seat

real = Seat.roll_call
Seat.roll_call = lambda seat, device, *more: real(seat, os.environ["FAKE_DEVICE"], *more)
main()
"""


def main() -> None:
    wanted = json.loads(sys.argv[1])
    world = str(len({rank for rank, _ in wanted}))
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    program = ["-c", WITH_DEVICE] if "FAKE_DEVICE" in os.environ else ["-m", "worker"]
    ranks = []
    for rank, arguments in wanted:
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *program, *arguments]
        ranks.append((rank, subprocess.Popen(command, env=environment, start_new_session=True)))
    for rank, process in ranks:
        print(f"rank {rank} ended with {process.wait()}", flush=True)


if __name__ == "__main__":
    main()

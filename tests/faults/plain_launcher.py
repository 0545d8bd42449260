"""What torchrun does for ranks, without torch: `python plain_launcher.py JSON`, a list of [rank, [arguments]].

It waits for all of them and prints how each ended. $BEFORE_MAIN: Python that each rank runs first.
"""

import json
import os
import subprocess
import sys


def main() -> None:
    wanted = json.loads(sys.argv[1])
    world = str(len({rank for rank, _ in wanted}))
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    patch = os.environ.get("BEFORE_MAIN")
    program = ["-m", "worker"] if patch is None else ["-c", f"{patch}\nfrom worker.__main__ import main\nmain()"]
    ranks = []
    for rank, arguments in wanted:
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *program, *arguments]
        ranks.append((rank, subprocess.Popen(command, env=environment, start_new_session=True)))
    for rank, process in ranks:
        print(f"rank {rank} ended with {process.wait()}", flush=True)


if __name__ == "__main__":
    main()

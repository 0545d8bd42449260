"""One rank under torchrun, for test_multirank: writes teacher-forced logits of a folder's model, with random weights.

usage: rank_of_a_gang.py FOLDER OUT TP PP DTYPE DEVICES
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch does not list them

from tests.gpu.teacher_forced import teacher_forced
from worker.execution.cuda_runner import CudaRunner
from worker.execution.make_runner import make_runner
from worker.execution.runner import RunnerConfig
from worker.model_config import ModelConfig
from worker.parallel.groups import leave_groups, make_groups
from worker.topology import Topology
from worker.weights import load_weights, open_weights

ROWS, LENGTH, PROMPT, BLOCKS = 4, 64, 40, 40
LIMIT_S = 130  # after which a rank says where it is, and ends; less than test_multirank waits


def main() -> None:
    folder, out, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[5])
    tp, pp, rank = int(sys.argv[3]), int(sys.argv[4]), int(os.environ["RANK"])
    devices = [int(number) for number in sys.argv[6].split(",")]
    began = time.monotonic()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)

    def reached(what: str) -> None:
        print(f"rank {rank}: {what} after {time.monotonic() - began:.1f} s", flush=True)

    device = torch.device("cuda", devices[rank])
    torch.cuda.set_device(device)
    config = ModelConfig.from_folder(folder)
    topology = Topology.of(config, rank, tp, pp, None)
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=serves)
    groups = make_groups(topology, PrefixStore("test", store), device, timedelta(seconds=120))
    groups.exercise(device, dtype)
    reached("groups")
    sizes = RunnerConfig(dtype, device, 16, 256, ROWS, 8, 128, pp + 2, 0, max_graph_rows=ROWS)
    runner = make_runner(config, topology, sizes, groups)
    assert isinstance(runner, CudaRunner)
    runner.load(lambda decoder: load_weights(decoder, open_weights(folder, "dummy")))
    runner.allocate(BLOCKS)
    reached("weights and cache")
    runner.warm_up()
    reached("warm-up")
    runner.capture()
    reached("graphs")
    sequences = np.random.default_rng(0).integers(0, config.vocab, (ROWS, LENGTH)).tolist()
    logits, tokens = teacher_forced(runner, BLOCKS, sequences, PROMPT)
    reached("logits")
    if logits:
        np.savez(out, logits=np.stack(logits), tokens=np.array(tokens).T, graphs=runner.graph_counts[0])
    runner.close()
    dist.barrier() if tp * pp > 1 else None
    leave_groups()


if __name__ == "__main__":
    main()

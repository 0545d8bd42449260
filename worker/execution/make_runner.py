"""The runner of a device."""

from __future__ import annotations

from worker.execution.model_runner import ModelRunner
from worker.execution.runner import RunnerConfig
from worker.model_config import ModelConfig
from worker.parallel.groups import Groups
from worker.topology import Topology


def make_runner(model_config: ModelConfig, topology: Topology, config: RunnerConfig, groups: Groups) -> ModelRunner:
    """For the device that `config` names, which must be the current one if it is a CUDA device."""
    if config.device.type == "cuda":
        from worker.execution.cuda_runner import CudaRunner  # imports Triton, which torch for CPUs has not

        return CudaRunner(model_config, topology, config, groups)
    return ModelRunner(model_config, topology, config, groups)

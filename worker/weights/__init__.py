"""From a checkpoint on disk to a rank's tensors: every parameter exactly once, only the slices this rank computes."""

from worker.weights.checkpoint import Checkpoint, WeightsError
from worker.weights.dummy import DummyWeights
from worker.weights.loader import load_weights
from worker.weights.placement import Piece, Placement
from worker.weights.source import Weights, open_weights

__all__ = [
    "Checkpoint", "DummyWeights", "Piece", "Placement", "Weights", "WeightsError", "load_weights", "open_weights",
]  # fmt: skip

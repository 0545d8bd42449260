"""A small real scheduler on the rankd wire: continuous batching, prefix reuse, preemption, pipelining."""

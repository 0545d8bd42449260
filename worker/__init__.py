"""rankd: the execution layer of an LLM engine, one process per device, driven over the wire of `workerproto`."""

VERSION = "0.1.0"
"""The package's; pyproject.toml reads it here, so that a tree that nobody installed has one too."""

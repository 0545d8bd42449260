"""What a fake gang's ranks look at before they agree to an operation that is allowed: whether they can."""

from __future__ import annotations

from collections.abc import Container

from workerproto.messages import RefusalCode
from workerproto.operations import Control, Profile, UpdateChunk, name_of
from workerproto.steps import Refusal


class FakeOperations:
    """Of ranks without memory or weights. lacks: names of operations that they have not."""

    def __init__(self, lacks: Container[str]) -> None:
        self._lacks = lacks
        self._profiles: bool | None = None  # None: no profile was ever started

    def prepare(self, operation: Control) -> None:
        """Raises Refusal if they cannot."""
        name = name_of(operation)
        if name in self._lacks:
            message, bound = f"{name} is not implemented", "one that this worker has"
            raise Refusal(RefusalCode.NOT_IMPLEMENTED, message, "op", name, bound)
        match operation:
            case UpdateChunk(source=source) if not source.startswith(("/", "shm:")):
                message = f"{source!r} names no chunk of weights"
                raise Refusal(
                    RefusalCode.BAD_ARGUMENT, message, "source", source, "an absolute path, or shm: and a name"
                )
            case Profile(start=start):
                if start and self._profiles:
                    raise Refusal(RefusalCode.NOT_POSSIBLE, "a profile runs already", "start", "true", "false")
                if not start and self._profiles is None:
                    raise Refusal(RefusalCode.NOT_POSSIBLE, "no profile was started", "start", "false", "true")
                self._profiles = start

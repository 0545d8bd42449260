"""Who drives a fake gang, and who may: the part of the first tier that is about leases."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from workerproto.codec import Header, WireError
from workerproto.messages import ErrorCode


@dataclass(slots=True)
class Holder:
    """heard, said: on the gang's clock."""

    peer: bytes
    lease: int
    heard: float
    said: float
    next_seq: int = 1
    last_answered: int = 0


def judge_hello(header: Header, holder: Holder | None, peer: bytes, *, takeover: bool) -> None:
    """Raises WireError for a Hello that does not attach."""
    if not header.lease or header.epoch or header.seq:
        raise WireError(ErrorCode.BAD_HEADER, "Hello has a lease, epoch 0 and sequence 0", "header", str(header))
    if holder and (holder.peer == peer or holder.lease == header.lease):
        raise WireError(ErrorCode.BAD_LEASE, f"lease {header.lease} is not a new one", "lease", str(header.lease))
    if holder and not takeover:
        raise WireError(ErrorCode.LEASE_HELD, "another scheduler holds the gang", "takeover", "false", "true")


def judge_sender(header: Header, holder: Holder | None, peer: bytes, ended: Container[int]) -> Holder:
    """The holder, if it is he who has sent this. Raises WireError for anybody else."""
    if holder is not None and holder.peer == peer and holder.lease == header.lease:
        return holder
    code = ErrorCode.LEASE_ENDED if header.lease in ended else ErrorCode.BAD_LEASE
    raise WireError(code, f"lease {header.lease} does not hold the gang", "lease", str(header.lease))

"""The rows in which the journal holds who was admitted, and by which invite. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = """
CREATE TABLE IF NOT EXISTS invites (
  number INTEGER PRIMARY KEY, at REAL NOT NULL, name TEXT NOT NULL, uses INTEGER NOT NULL, expires_at REAL NOT NULL,
  is_revoked INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS admissions (
  serial INTEGER PRIMARY KEY, at REAL NOT NULL, peer TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL,
  invite INTEGER NOT NULL);
"""
RUNS_OWN = 0  # the invite that the coordinator prints
NO_INVITE = -1  # of an admission by proof of work, or by the operator


@dataclass(frozen=True)
class InviteRow:
    """An invite that was made. Its token follows from the run's key and the number: the journal holds no secret."""

    number: int
    at: float  # seconds since the epoch
    name: str  # for whom
    uses: int  # 0: any number
    expires_at: float  # by the swarm's time; 0: never
    is_revoked: bool


@dataclass(frozen=True)
class AdmissionRow:
    """A peer was admitted. Later admissions of the same peer replace earlier ones."""

    serial: int
    at: float
    peer: str
    name: str
    kind: str
    invite: int  # number; or NO_INVITE


def why_not(invite: InviteRow | None, num_used: int, now: float) -> str:
    """Why an invite admits nobody more; empty if it does."""
    if invite is None:
        return "it is not known"
    if invite.is_revoked:
        return "it was revoked"
    if invite.expires_at and now >= invite.expires_at:
        return "it has expired"
    if invite.uses and num_used >= invite.uses:
        return "it is used up"
    return ""

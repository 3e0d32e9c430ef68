"""The run's definition as the coordinator offers it and every peer checks it: signed, and with digests of U and T."""

from __future__ import annotations

import logging

from swarmtrain import __version__
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.model.subspace import first_basis, tensor_digest
from swarmtrain.model.table import table_digest
from swarmtrain.p2p.identity import RunKey, verify
from swarmtrain.run.invite import Invite, run_id_of
from swarmtrain.run.manifest import Manifest, parse_manifest
from swarmtrain.wire.messages import RunOffer

log = logging.getLogger(__name__)

COORDINATOR_TOPIC = "coordinator"


class RunRefused(SwarmtrainError):
    """What the coordinator offers is not what the invite promised, or the run does not want this peer."""

    error_id = "ST-RUN-REFUSED"
    exit_code = ExitCode.REFUSED


class ArtefactMismatch(SwarmtrainError):
    """This machine derives other frozen tensors from the seed than the run uses."""

    error_id = "ST-ARTEFACT"
    exit_code = ExitCode.DIVERGED


def make_offer(manifest: Manifest, key: RunKey) -> RunOffer:
    """The offer of a coordinator that holds the run's key."""
    basis, table = artefact_digests(manifest)
    signature = key.sign(_signed_part(manifest.canonical(), basis, table))
    return RunOffer(manifest.canonical(), basis, table, signature, __version__)


def _signed_part(manifest: str, basis: str, table: str) -> bytes:
    """Of a manifest's canonical text and the digests of U and T."""
    return "\n".join(["swarmtrain run", manifest, basis, table]).encode()


def checked_offer(offer: RunOffer, invite: Invite) -> Manifest:
    """The manifest of an offer that the run's key has signed and that is the run of the invite."""
    signed = _signed_part(offer.manifest, offer.basis_digest, offer.table_digest)
    if not verify(invite.run_key, offer.signature, signed):
        raise RunRefused("the manifest is not signed by the run's key", fix="ask the operator for a new invite")
    manifest = parse_manifest(offer.manifest)
    if run_id_of(manifest.digest(), invite.run_key) != invite.run_id:
        raise RunRefused("the coordinator serves another run than the invite's", fix="ask for a new invite")
    if offer.version.split(".")[:2] != __version__.split(".")[:2]:
        log.warning("the coordinator runs swarmtrain %s, this is %s", offer.version, __version__)
    check_artefacts(manifest, offer.basis_digest, offer.table_digest)
    return manifest


def artefact_digests(manifest: Manifest) -> tuple[str, str]:
    """(digest of U, digest of T) as this machine derives them from the seed; empty for a dense boundary."""
    if manifest.boundary.kind == "dense":
        return "", ""
    return tensor_digest(first_basis(manifest)), table_digest(manifest)


def check_artefacts(manifest: Manifest, basis: str, table: str) -> None:
    """Refuse to serve with a U or T that differs from the run's."""
    own = artefact_digests(manifest)
    for name, mine, theirs in zip(("basis U", "token table T"), own, (basis, table), strict=True):
        if mine != theirs:
            raise ArtefactMismatch(
                f"the {name} derived here has digest {mine[:12]}, the run's is {theirs[:12]}",
                fix="this machine's linear algebra rounds differently; use the project's pinned versions",
            )

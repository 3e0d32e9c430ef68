"""Who is in the run, as one daemon knows it: the run's secret, certificates shown on links, and exclusions.

A daemon proves that it has the secret with a message authentication code over both ends' peer ids. These are
authenticated by the transport, so a proof is of no use to anybody else, and the secret itself is never sent. The code
depends on who sends, so no end can answer with what it was sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable

from swarmtrain import world
from swarmtrain.chain.exclusions import Exclusions
from swarmtrain.p2p.identity import verify
from swarmtrain.run.invite import Invite
from swarmtrain.wire.certificates import Certificate, parse_credential, signed_part

PROOF_BYTES = 16
MAX_KNOWN = 8192  # peers whose certificates are remembered; one that is forgotten shows its own with its next link
MAX_CHECKED = 8192
EXPIRY_ALLOWANCE_S = 60.0  # by how much the clocks of two daemons may differ


class Membership:
    """See the module docstring. A `Gate` of links and of the directory."""

    def __init__(self, invite: Invite, exclusions: Exclusions | None = None) -> None:
        self._run_id, self._run_key = invite.run_id, invite.run_key
        self._key = hmac.digest(invite.secret, f"swarmtrain member {invite.run_id}".encode(), hashlib.sha256)
        self.exclusions = exclusions if exclusions is not None else Exclusions()
        self.clock: Callable[[], float] = world.wall  # the swarm's, as soon as there is a directory
        self.peer_id = ""  # of this daemon, as soon as it has a host
        self._own = b""
        self._known: OrderedDict[str, Certificate] = OrderedDict()
        self._checked: OrderedDict[bytes, Certificate | None] = OrderedDict()  # a signature costs 100 us
        self.num_unproven = 0
        self.num_flawed = 0

    # ---- the gate of links ------------------------------------------------------------------------------------------

    @property
    def namespace(self) -> str:
        """What the run is called where anybody can read it."""
        return hmac.digest(self._key, b"namespace", hashlib.sha256).hex()[:16]

    def proof(self, peer_id: str) -> bytes:
        """See `Gate`."""
        return self._code(self.peer_id, peer_id)

    def is_proven(self, peer_id: str, proof: bytes) -> bool:
        """See `Gate`."""
        is_right = hmac.compare_digest(self._code(peer_id, self.peer_id), proof)
        self.num_unproven += not is_right
        return is_right

    def credential(self) -> bytes:
        """See `Gate`."""
        return self._own

    def met(self, peer_id: str, credential: bytes) -> bool:
        """See `Gate`."""
        certificate = self._check(credential)
        if certificate is None or certificate.peer_id != peer_id:
            self.num_flawed += 1
            return False
        self._known[peer_id] = certificate
        self._known.move_to_end(peer_id)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return True

    def _code(self, sender: str, receiver: str) -> bytes:
        text = f"{sender}\0{receiver}".encode()
        return hmac.digest(self._key, text, hashlib.sha256)[:PROOF_BYTES]

    # ---- certificates -----------------------------------------------------------------------------------------------

    def hold(self, credential: bytes) -> Certificate | None:
        """Take this daemon's own certificate; None, and nothing changes, if it is not one of this run for this peer."""
        certificate = self._check(credential)
        if certificate is None or certificate.peer_id != self.peer_id:
            return None
        self._own = credential
        return certificate

    def certificate_of(self, peer_id: str) -> Certificate | None:
        """The certificate that a peer has shown on its link, if it is in force now."""
        certificate = self._known.get(peer_id)
        return certificate if certificate is not None and self._is_in_force(certificate) else None

    def vouches(self, peer_id: str, credential: bytes) -> bool:
        """Whether a credential entitles this peer now."""
        certificate = self._check(credential)
        return certificate is not None and certificate.peer_id == peer_id and self._is_in_force(certificate)

    def is_excluded(self, peer_id: str) -> bool:
        """Whether the run has nothing to do with a peer any more."""
        return peer_id in self.exclusions

    def _is_in_force(self, certificate: Certificate) -> bool:
        if certificate.peer_id in self.exclusions or revoked(certificate.serial) in self.exclusions:
            return False
        return self.clock() < certificate.expires_at + EXPIRY_ALLOWANCE_S

    def _check(self, credential: bytes) -> Certificate | None:
        """The certificate in a credential, if the run's key has signed it for this run; not whether it is in force."""
        if credential not in self._checked:
            self._checked[credential] = self._examined(credential)
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        return self._checked[credential]

    def _examined(self, credential: bytes) -> Certificate | None:
        signed = parse_credential(credential)
        if signed is None or signed.certificate.run != self._run_id:
            return None
        is_signed = verify(self._run_key, signed.signature, signed_part(signed.certificate))
        return signed.certificate if is_signed else None


def revoked(serial: int) -> str:
    """What the list of exclusions calls an admission that was taken back."""
    return f"#{serial}"

"""The run's definition: believed only if the run's key has signed it and it is the run of the invite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmtrain.chain import offer as offer_module
from swarmtrain.chain.offer import ArtefactMismatch, RunRefused, checked_offer, make_offer
from swarmtrain.p2p.identity import RunKey
from swarmtrain.run.invite import Invite, run_id_of
from swarmtrain.run.presets import preset

MANIFEST = preset("nano", ["model.hidden_size=32", "model.num_layers=4", "model.ffn_size=48", "boundary.k=4"])
KEY = RunKey.generate()
INVITE = Invite(run_id_of(MANIFEST.digest(), KEY.public_bytes), KEY.public_bytes, ())


def test_the_operators_offer_is_believed() -> None:
    assert checked_offer(make_offer(MANIFEST, KEY), INVITE) == MANIFEST


def test_an_altered_manifest_digest_or_signature_is_refused() -> None:
    sound = make_offer(MANIFEST, KEY)
    for forged in (
        replace(sound, manifest=sound.manifest.replace("seed = 7", "seed = 8")),
        replace(sound, basis_digest="0" * 64),
        replace(sound, table_digest="0" * 64),
        replace(sound, signature=bytes(64)),
        replace(sound, signature=b""),
    ):
        assert forged != sound
        with pytest.raises(RunRefused, match="not signed"):
            checked_offer(forged, INVITE)


def test_another_keys_offer_is_refused() -> None:
    with pytest.raises(RunRefused, match="not signed"):
        checked_offer(make_offer(MANIFEST, RunKey.generate()), INVITE)


def test_another_run_of_the_same_operator_is_refused() -> None:
    other = preset("nano", ["model.hidden_size=32", "model.num_layers=4", "model.ffn_size=64", "boundary.k=4"])
    with pytest.raises(RunRefused, match="another run"):
        checked_offer(make_offer(other, KEY), INVITE)


def test_a_machine_that_derives_other_tensors_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = make_offer(MANIFEST, KEY)
    monkeypatch.setattr(offer_module, "artefact_digests", lambda _: ("f" * 64, sound.table_digest))
    with pytest.raises(ArtefactMismatch, match="basis U"):
        checked_offer(sound, INVITE)

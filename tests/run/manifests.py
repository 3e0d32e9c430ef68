"""A manifest to damage, and what every refusal of one must look like."""

from __future__ import annotations

import pytest

from swarmtrain.errors import ExitCode, ManifestError
from swarmtrain.run.manifest import Manifest, parse_manifest
from swarmtrain.run.presets import preset

BASE = preset("nano").canonical()


def fit_to_show(error: ManifestError) -> bool:
    """One printable line of bearable length, with the exit code of bad usage."""
    text = str(error)
    return text.isprintable() and 0 < len(text) < 400 and error.exit_code == ExitCode.USAGE


def refused(text: str = BASE, *overrides: str) -> ManifestError:
    """The error that a manifest ends in, fit to be shown."""
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, overrides)
    assert fit_to_show(caught.value)
    return caught.value


def parsed_or_refused(text: str = BASE, *overrides: str) -> Manifest | ManifestError:
    """The manifest, or else an error that is fit to be shown; never anything else."""
    try:
        return parse_manifest(text, overrides)
    except ManifestError as error:
        if not fit_to_show(error):
            raise AssertionError(repr(str(error))) from error
        return error

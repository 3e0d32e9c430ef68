"""What a test needs of the machine beyond Python: without it the test is skipped with a reason, in CI it fails.

`.ci/run` sets SWARMTRAIN_TEST_REQUIRE=1, so that nothing that could not be installed there goes unnoticed.
"""

from __future__ import annotations

import os

import pytest

from swarmtrain.native.bf16 import has_bf16

REQUIRE = "SWARMTRAIN_TEST_REQUIRE"


HAS_BF16 = has_bf16()  # before torch multiplies anything in this process: then its products in bf16 are safe


def needs(is_here: bool, why_not: str) -> pytest.MarkDecorator:
    """Mark tests that need something which `is_here` or not."""
    return pytest.mark.needs(is_here, why_not)


def needs_bf16() -> pytest.MarkDecorator:
    """Mark tests that multiply bf16 tensors."""
    return needs(HAS_BF16, "products in bf16 fail on this processor")


def missing(why_not: str) -> None:
    """End this test: something that it needs is not here."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{why_not}; {REQUIRE}=1 says that it must be", pytrace=False)
    pytest.skip(why_not)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(is_here, why_not): needs something that a machine may not have")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: there is no use in starting a swarm for nothing."""
    for mark in item.iter_markers("needs"):
        is_here, why_not = mark.args
        if not is_here:
            missing(why_not)

"""The probes by which tests are skipped, against what is known of releases.

With the release that is vouched for nothing may be skipped.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from te_capabilities import CAPABILITIES, has

pytestmark = pytest.mark.te
# Older releases have them where there is a driver.
BY_DRIVER = {"fake CUDA tensors", "current scaling without memory"}
MISSING: dict[str, set[str]] = {
    "2.20.2": set(),
    "2.9.0": {*CAPABILITIES} - BY_DRIVER,
}


@pytest.fixture
def missing() -> set[str]:
    return {name for name in CAPABILITIES if not has(name)}


def test_a_known_release_lacks_what_it_is_known_to_lack(missing: set[str]) -> None:
    release = metadata.version("transformer-engine")
    if release not in MISSING:
        pytest.skip(f"what Transformer Engine {release} lacks is not written down")
    assert missing - BY_DRIVER == MISSING[release]


def test_with_the_release_that_is_vouched_for_nothing_is_skipped(
    missing: set[str],
) -> None:
    if (release := metadata.version("transformer-engine")) != "2.20.2":
        pytest.skip(f"Transformer Engine {release} is not the one that is vouched for")
    torch_release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    # Without a driver, torch has to be one that can do without it.
    asks_a_driver = not torch.cuda.is_available() and torch_release < (2, 14)
    assert missing == ({"fake CUDA tensors"} if asks_a_driver else set())


def test_every_capability_is_asked_for_by_a_test() -> None:
    here = Path(__file__).parent
    text = "".join(path.read_text() for path in here.glob("test_*.py"))
    for name in CAPABILITIES:
        asked = re.search(rf'(te_needs|has)\(\s*"{re.escape(name)}"', text)
        assert asked, f"no test asks for {name!r}"


def test_every_name_that_a_test_asks_for_is_a_capability() -> None:
    here = Path(__file__).parent
    text = "".join(path.read_text() for path in here.glob("*.py"))
    asked = set(re.findall(r'(?:te_needs|has)\(\s*"([^"]+)"', text))
    assert asked
    assert asked <= {*CAPABILITIES}

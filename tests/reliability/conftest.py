"""How long the laws are tested: a short profile by default, a long one on request.

`python -m tests.reliability 20000` tries each law that often, and every kind of error
at every boundary; the figures of the last such run are in `docs/reliability.md`.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

SHORT_EXAMPLES = 60
_ASKED = os.environ.get("RELIABILITY_EXAMPLES")

hypothesis.settings.register_profile(
    "reliability",
    max_examples=int(_ASKED or SHORT_EXAMPLES),
    deadline=None,
    # The short profile is a regression test, the long one a search.
    derandomize=_ASKED is None,
    database=None,
    # Explaining takes minutes where an example costs milliseconds.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
hypothesis.settings.load_profile("reliability")


@pytest.fixture(autouse=True)
def _numbers_are_left_as_found():
    import torch

    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)

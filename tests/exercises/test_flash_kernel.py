"""The exercise of notebook 09 in Triton: its second kernel."""

import pytest

pytest.importorskip("triton", reason="triton isn't installed")
from .every import *  # noqa: F403

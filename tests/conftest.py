"""nbval reads its sanitiser file relative to the current directory; this makes it work from any."""

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.option.nbval_sanitize_with = str(Path(__file__).with_name("nbval-sanitize.cfg"))

"""What holds for all tests, wherever and however pytest was started."""

import signal
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # nbval reads its sanitiser file relative to the current directory; this makes it work from any.
    config.option.nbval_sanitize_with = str(Path(__file__).with_name("nbval-sanitize.cfg"))
    # Jobs that a shell runs in the background start with interrupts ignored; tests of interrupts need them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

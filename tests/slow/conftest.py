"""What all slow tests of commands share."""

from pathlib import Path

import pytest

from tests.slow.commands import build_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    return build_inputs(tmp_path_factory.mktemp("inputs"))

"""What the tests of collection share: one machine's files, built once."""

import pytest
from evidence_image import build_image


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    return build_image(tmp_path_factory.mktemp("image"))

"""Fixtures that tests of several parts share."""

import pytest
from helpers.runs import make_data
from hypothesis import settings

# On a shared machine an example may take any time.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Folder of a tiny tokenizer and the blends train.yaml and valid.yaml."""
    return make_data(tmp_path_factory.mktemp("tiny_data"))

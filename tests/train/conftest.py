import pytest

from gva.data.prepare import prepare_standard_library


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The embedded default, prepared once."""
    folder = tmp_path_factory.mktemp("data")
    prepare_standard_library(folder, vocab_size=512, progress=False)
    return folder

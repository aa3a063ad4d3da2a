"""One S3 server for the tests of a module, which finds it by its variables."""

import pytest

from harness.object_store import object_store


@pytest.fixture(scope="module")
def store():
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with object_store(smallest=1024) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found

import pytest

from tests.support.reports import chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page

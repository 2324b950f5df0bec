import pytest

from tests.support.browser import chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page

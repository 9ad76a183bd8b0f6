"""The chat page in Chromium, against a server whose answers the test writes; skipped where playwright or Chromium is
not installed.
"""

import pytest
from servers.page_browser import chromium, visits


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def server(browser):
    from servers.scripted_server import ScriptedServer

    with ScriptedServer() as server:
        yield server


@pytest.fixture
def visit(browser, server):
    with visits(browser, server.address) as visit:
        yield visit


@pytest.fixture
def says(server):
    """says(fields of an Answer) has the server give that answer next."""
    from servers.scripted_server import ScriptedAnswer

    return lambda **fields: server.answers.append(ScriptedAnswer(**fields))

"""Who may call the server: keys, host names and origins. Otherwise any web page could call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import slm_core as slm
from server.conftest import QUESTION, Client
from slm_core.errors import InvalidOption
from slm_core.server import ServedModel, ServerOptions

Make = Callable[..., Client]
PAGE = "https://page.example"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "server.example"])
def test_another_address_than_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidOption, match="give a key, or no_auth"):
        ServerOptions(host=host)
    ServerOptions(host=host, keys=("k",))
    ServerOptions(host=host, no_auth=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_key(host: str) -> None:
    ServerOptions(host=host)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer one two"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x-api-key": "two"}, 200),
    ],
    ids=str,
)
def test_keys(client_with: Make, sent: dict[str, str], status: int) -> None:
    client = client_with(keys=("one", "two"))
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert client.get(path, **sent).status_code == status
    refused = client.post("/v1/chat/completions", {**QUESTION, "model": "unknown"}, **sent)
    assert refused.status_code == (401 if status == 401 else 404)
    assert client.get("/health", **sent).status_code == 200
    assert "one" not in client.log.getvalue()


@pytest.mark.parametrize("key", ["", " ", "a b", " a", "a\n", "a\tb", "ä"])
def test_a_key_fits_into_a_header(key: Any) -> None:
    """Otherwise a part of a key would open the server."""
    with pytest.raises(InvalidOption, match="a key is empty, has spaces, or is not printable ASCII"):
        ServerOptions(keys=(key,))


@pytest.mark.parametrize("name", ["keys", "allowed_hosts", "allowed_origins", "aliases"])
@pytest.mark.parametrize(
    ("value", "message"),
    [("abc", "is of type str"), (5, "is of type int"), (None, "is of"), ([5], "has an item of type int")],
)
def test_a_text_alone_is_no_collection_of_texts(name: str, value: Any, message: str) -> None:
    """Otherwise each letter of a key would be a key, and the error would show it."""
    with pytest.raises(InvalidOption, match=f"{name} {message}.* .accepted: a tuple or list of texts") as refused:
        if name == "aliases":
            ServedModel("a", slm.load, aliases=value)
        else:
            ServerOptions(**{name: value})
    assert "abc" not in str(refused.value)


def test_collections_of_texts() -> None:
    options: Any = {"keys": ["one"], "allowed_hosts": {"a.example"}, "allowed_origins": [PAGE]}
    assert [key.key for key in ServerOptions(**options).api_keys] == ["one"]


def test_without_keys_a_key_is_ignored(client_with: Make) -> None:
    assert client_with().get("/v1/models", authorization="Bearer none").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "", "127.0.0.1.nip.io"]
)
def test_a_name_that_was_rebound_is_refused(client_with: Make, host: str) -> None:
    assert client_with().get("/v1/models", host=host).status_code == 403


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
def test_names_of_this_machine(client_with: Make, host: str) -> None:
    assert client_with().get("/v1/models", host=host).status_code == 200


def test_allowed_names(client_with: Make) -> None:
    client = client_with(host="0.0.0.0", keys=("k",), allowed_hosts=("model.example",))
    for host, status in (("model.example:80", 200), ("192.168.1.5:8080", 200), ("evil.example", 403)):
        assert client.get("/v1/models", host=host, authorization="Bearer k").status_code == status


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "http://localhost.evil.example"])
def test_other_pages_may_not_call(client_with: Make, origin: str) -> None:
    client = client_with()
    asks = {"origin": origin, "access-control-request-method": "POST"}
    for response in (
        client.post("/v1/chat/completions", QUESTION, origin=origin),
        client.call("OPTIONS", "/v1/models", headers=asks),
    ):
        assert response.status_code == 403
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_its_own_page_may_call(client_with: Make) -> None:
    assert client_with().get("/v1/models", host="localhost:8080", origin="http://localhost:8080").status_code == 200


def test_listed_pages_may_call(client_with: Make) -> None:
    client = client_with(allowed_origins=(PAGE,), keys=("k",))
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = client.call("OPTIONS", "/v1/chat/completions", headers=asks)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    answer = client.get("/v1/models", origin=PAGE, authorization="Bearer k")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert client.get("/v1/models", origin=PAGE).status_code == 401
    assert client.get("/v1/models", origin="https://other.example", authorization="Bearer k").status_code == 403


@pytest.mark.parametrize(("path", "key"), [("/v1/messages", "type"), ("/api/chat", "error"), ("/v1/nothing", "error")])
def test_errors_have_the_form_of_their_api(client_with: Make, path: str, key: str) -> None:
    body = client_with(keys=("k",)).post(path, {}).json()
    forms = {
        "/v1/messages": lambda: body["error"]["type"] == "authentication_error" and body["type"] == "error",
        "/api/chat": lambda: isinstance(body["error"], str),
        "/v1/nothing": lambda: body["error"]["code"] == "invalid_api_key",
    }
    assert key in body
    assert forms[path]()

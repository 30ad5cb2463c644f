"""/v1/sessions: the answers are those of chat completions with the same messages."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import slm_core as slm
from server.conftest import Body, Client, frames
from server.test_openai_chat import WEATHER, message_of, plain
from slm_core.server import ApiKey, EngineSettings, ServedModel, create_app, session_files, session_store
from slm_core.server.session_store import MOST_SESSIONS, ServedSession, SessionStore


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def made(client: Client, **fields: Any) -> str:
    response = client.post("/v1/sessions", fields)
    assert response.status_code == 200, response.text
    session_id: str = response.json()["id"]
    return session_id


def say(client: Client, session_id: str, text: str, **fields: Any) -> Body:
    body = {"messages": [user(text)], "temperature": 0, "max_tokens": 60, **fields}
    response = client.post(f"/v1/sessions/{session_id}/messages", body)
    assert response.status_code == 200, response.text
    message: Body = response.json()["choices"][0]["message"]
    return message


def messages(client: Client, session_id: str) -> list[Body]:
    messages: list[Body] = client.get(f"/v1/sessions/{session_id}").json()["messages"]
    return messages


def alone(client: Client, *history: Body) -> str:
    """The answer of chat completions."""
    text: str = client.chat(messages=list(history), max_tokens=60)["choices"][0]["message"]["content"]
    return text


def test_a_session_keeps_its_messages(client: Client) -> None:
    session_id = made(client, messages=[{"role": "system", "content": "Be short."}], name="sums")
    system = {"role": "system", "content": "Be short."}
    first = say(client, session_id, "My dog is called Rex.")["content"]
    assert first == alone(client, system, user("My dog is called Rex."))
    history = [system, user("My dog is called Rex."), {"role": "assistant", "content": first}]
    assert messages(client, session_id) == history
    second = say(client, session_id, "What is my dog called?")["content"]
    assert second == alone(client, *history, user("What is my dog called?"))
    session = client.get(f"/v1/sessions/{session_id}").json()
    assert session["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    cells = client.get(f"/v1/sessions/{session_id}/cells").json()
    assert sum(cells[use] for use in ("own", "shared", "cached", "free")) == cells["n_ctx"] == 2048
    assert cells["session_tokens"] == session["usage"]["total_tokens"]


def test_a_streamed_turn_is_kept(client: Client) -> None:
    whole, streamed = made(client, tools=[WEATHER]), made(client, tools=[WEATHER])
    body = {"messages": [user("What is the weather in Rome?")], "temperature": 0}
    message = client.post(f"/v1/sessions/{whole}/messages", body).json()["choices"][0]["message"]
    chunks = client.stream(f"/v1/sessions/{streamed}/messages", **body)
    assert message_of(chunks) == plain(message)
    answers = [messages(client, session_id)[-1] for session_id in (whole, streamed)]
    for each in answers:
        for call in each["tool_calls"]:
            del call["id"]
    assert answers[0] == answers[1]


def test_edits(client: Client) -> None:
    """Each edit changes the messages, and the next answer is that of the changed messages."""
    session_id = made(client)
    path = f"/v1/sessions/{session_id}"
    say(client, session_id, "My dog is called Rex.")
    say(client, session_id, "What is 12 + 30?")
    twin = client.post(f"{path}/fork", {}).json()["id"]
    before = client.post(f"{path}/fork", {"n_messages": 2, "name": "before"}).json()
    assert before["name"] == "before" and before["messages"] == messages(client, session_id)[:2]
    client.call("PATCH", f"{path}/messages/0", json={"message": user("My dog is called Luna.")})
    client.call("DELETE", f"{path}/messages/3")
    client.call("DELETE", f"{path}/messages/2")
    history = messages(client, session_id)
    assert history[0]["content"] == "My dog is called Luna." and len(history) == 2
    question = user("What is my dog called?")
    assert say(client, session_id, question["content"])["content"] == alone(client, *history, question)
    client.post(f"{path}/truncate", {"n_messages": 1})
    assert messages(client, session_id) == [user("My dog is called Luna.")]
    assert len(messages(client, twin)) == 4, "a fork is another session"


def test_a_dump_is_restored(client: Client) -> None:
    session_id = made(client, tools=[WEATHER], name="n")
    say(client, session_id, "What is the weather in Rome?")
    dump = client.get(f"/v1/sessions/{session_id}/dump").json()
    twin = client.post("/v1/sessions/restore", dump).json()["id"]
    assert twin != session_id
    assert client.get(f"/v1/sessions/{twin}/dump").json() == dump
    result = {"role": "tool", "tool_call_id": dump["messages"][-1]["tool_calls"][0]["id"], "content": "Sunny."}
    answers = [
        client.post(f"/v1/sessions/{each}/messages", {"messages": [result], "temperature": 0}).json()["choices"]
        for each in (session_id, twin)
    ]
    assert answers[0][0]["message"]["content"] == answers[1][0]["message"]["content"]
    for changes in ({"version": 2}, {"object": "x"}, {"messages": [{"role": "none"}]}, {"more": 1}, {"model": 7}):
        assert client.post("/v1/sessions/restore", {**dump, **changes}).status_code == 400


def test_forgotten_messages_are_cut_out_of_the_cache() -> None:
    """What follows them is not computed again; the engine cuts between 8 tokens before and 32 after."""
    settings = EngineSettings(n_ctx=2048, reuse="cut")
    app = create_app([ServedModel("demo", lambda: slm.load(slm.demo_model_path()), settings=settings)], log=None)
    client = Client(app, None)  # type: ignore[arg-type]
    system = {"role": "system", "content": "You are a friendly helper who answers every question."}
    session_id = made(client, messages=[system])
    long = "I live in Rome, near the river, in a small house with a green door, two old cats and a garden."
    for text in ("My dog is called Rex.", long, "What is 12 + 30?"):
        say(client, session_id, text)
    history = messages(client, session_id)
    forgot = client.post(f"/v1/sessions/{session_id}/forget", {"start": 1, "end": 3}).json()
    assert forgot["messages"] == [system, *history[3:]]
    say(client, session_id, "And 1 + 1?")
    usage = client.get(f"/v1/sessions/{session_id}").json()["usage"]
    assert usage["shifted_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["shifted_tokens"]
    for body in ({"start": 0, "end": 99}, {"start": 2, "end": 2}):
        assert client.post(f"/v1/sessions/{session_id}/forget", body).status_code == 400
    client.run(app.state.registry.close())


def test_forgetting_needs_reuse(client: Client) -> None:
    session_id = made(client, messages=[user("a"), user("b")])
    refused = client.post(f"/v1/sessions/{session_id}/forget", {"start": 0, "end": 1})
    assert refused.status_code == 400 and "--reuse cut" in refused.json()["error"]["message"]


def test_a_failed_turn_changes_nothing(client: Client) -> None:
    session_id = made(client, messages=[user("My dog is called Rex.")])
    path = f"/v1/sessions/{session_id}/messages"
    for changes in (
        {"temperature": -1},
        {"n": 2},
        {"unknown": 1},
        {"continue_final_message": True},
        {"keep_partial": True},
        {"messages": [user("word " * 5000)]},
        {"messages": [user("word " * 5000)], "stream": True},
    ):
        body = {"messages": [user("And?")], **changes}
        assert client.post(path, body).status_code == 400, changes
    assert messages(client, session_id) == [user("My dog is called Rex.")]
    assert say(client, session_id, "And?")["content"] is not None, "it is not busy"


def test_a_session_answers_one_request_at_a_time(client: Client) -> None:
    session_id = made(client)
    endless = {"messages": [user("x")], "logit_bias": {"2": -100}, "max_tokens": 1500}

    async def main() -> None:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            path = f"/v1/sessions/{session_id}"
            task = asyncio.create_task(http.post(f"{path}/messages", json=endless))
            await asyncio.sleep(0)
            while (refused := await http.post(f"{path}/truncate", json={"n_messages": 0})).status_code == 200:
                await asyncio.sleep(0.001)
            assert refused.status_code == 409 and refused.json()["error"]["code"] == "session_busy"
            assert (await http.post(f"{path}/fork", json={})).status_code == 200
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await http.post(f"{path}/truncate", json={"n_messages": 0})).status_code == 200

    client.run(main())
    assert messages(client, session_id) == [], "a lost client's turn is not kept"


def test_a_session_is_busy_until_its_stream_ends(client: Client) -> None:
    session_id = made(client)
    fields = {"messages": [user("What is 12 + 30?")], "stream": True}
    statuses = []

    async def main() -> None:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:

            async def refused(message: Any) -> None:
                if message["type"] == "http.response.body" and message.get("body"):
                    path = f"/v1/sessions/{session_id}/truncate"
                    statuses.append((await http.post(path, json={"n_messages": 0})).status_code)

            body = json.dumps(fields).encode()
            received = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                return received.pop() if received else await asyncio.Future()

            await client.app(scope_of(f"/v1/sessions/{session_id}/messages"), receive, refused)

    client.run(main())
    assert len(statuses) > 2 and set(statuses) == {409}
    assert len(messages(client, session_id)) == 2


def test_the_last_message_is_answered_again(client: Client) -> None:
    session_id = made(client)
    path = f"/v1/sessions/{session_id}"
    refused = client.post(f"{path}/messages", {})
    assert refused.status_code == 400 and "no message to answer" in refused.json()["error"]["message"]
    answer = say(client, session_id, "My dog is called Rex.")
    assert client.post(f"{path}/messages", {}).status_code == 400, "the last message is an answer"
    client.post(f"{path}/truncate", {"n_messages": 1})
    again = client.post(f"{path}/messages", {"temperature": 0, "max_tokens": 60}).json()
    assert again["choices"][0]["message"]["content"] == answer["content"]
    assert [message["role"] for message in messages(client, session_id)] == ["user", "assistant"]


@pytest.mark.parametrize("n_pieces", [0, 5])
def test_a_lost_client_may_keep_its_partial_answer(client: Client, n_pieces: int) -> None:
    session_id = made(client)
    body = {"messages": [user("x")], "logit_bias": {"2": -100}, "max_tokens": 1500, "stream": True}

    async def main() -> list[str]:
        is_lost, texts = asyncio.Event(), []

        async def send(message: Any) -> None:
            for data in frames(message.get("body", b"").decode()):
                delta = json.loads(data)["choices"][0]["delta"]
                texts.append(delta["content"])
            if len(texts) > n_pieces:  # the first one has the role only
                is_lost.set()

        received = [{"type": "http.request", "body": json.dumps({**body, "keep_partial": True}).encode()}]

        async def receive() -> Any:
            if not received:
                await is_lost.wait()
                return {"type": "http.disconnect"}
            return received.pop()

        await client.app(scope_of(f"/v1/sessions/{session_id}/messages"), receive, send)
        return texts

    texts = client.run(main())
    session = client.get(f"/v1/sessions/{session_id}").json()
    assert session["answering"] is False and session["messages"][0] == user("x")
    answer = [*session["messages"], {"content": ""}][1]
    assert answer["content"].startswith("".join(texts)), "what was sent is kept"
    assert len(answer["content"]) < len("".join(texts)) + 200, "it ended soon afterwards"
    if n_pieces:
        assert session["usage"]["completion_tokens"] >= n_pieces


def test_a_call_that_is_cut_is_kept_as_text(client: Client) -> None:
    """A cut call would have no result: as text, it leaves the session usable."""
    session_id = made(client, tools=[WEATHER])
    say(client, session_id, "What is the weather in Rome?", max_tokens=14)
    answer = messages(client, session_id)[-1]
    assert "tool_calls" not in answer and "get_weather" in answer["content"]
    assert say(client, session_id, "What is 12 + 30?")["content"] is not None


def scope_of(path: str) -> Body:
    """The ASGI scope of a POST request with a JSON body."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "scheme": "http", "query_string": b"", "headers": headers}


def test_sessions_belong_to_a_key(client_with: Callable[..., Client]) -> None:
    client = client_with(keys=(ApiKey("a"), ApiKey("b")))
    session = client.post("/v1/sessions", {"messages": [user("secret")]}, authorization="Bearer a").json()
    path = f"/v1/sessions/{session['id']}"
    assert client.get(path, authorization="Bearer a").status_code == 200
    for rest in ("", "/dump", "/cells"):
        assert client.get(path + rest, authorization="Bearer b").status_code == 404
    assert client.get("/v1/sessions", authorization="Bearer b").json()["data"] == []
    (listed,) = client.get("/v1/sessions", authorization="Bearer a").json()["data"]
    assert listed["n_messages"] == 1 and "messages" not in listed
    assert client.call("DELETE", path, headers={"authorization": "Bearer a"}).json()["deleted"]
    assert client.get(path, authorization="Bearer a").status_code == 404
    assert client.get(path, authorization="Bearer a").json()["error"]["code"] == "session_not_found"


def test_sessions_are_bounded() -> None:
    store = SessionStore()
    for number in range(MOST_SESSIONS):
        store.add(ServedSession(str(number), "", "m", "", [], []))
    with pytest.raises(slm.SlmError, match=f"the server keeps {MOST_SESSIONS} sessions: delete some first"):
        store.add(ServedSession("one more", "", "m", "", [], []))
    store.remove(store.of("")[0])
    store.add(ServedSession(str(number), "", "m", "", [], []))
    with pytest.raises(slm.SlmError, match="64 MiB of messages"):
        store.check_size(65 << 20)


def test_no_change_reads_the_messages_of_other_sessions(
    client_with: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full stores have 64 MiB of messages: writing them as JSON would stop all streams for half a second."""
    client = client_with()
    large = client.post("/v1/sessions", {"messages": [{"role": "user", "content": "x"}] * 1000}).json()["id"]
    written = 0

    def write(messages: list[Any], *, exclude_none: bool = True) -> list[Any]:
        nonlocal written
        written += len(messages)
        return [message.model_dump(exclude_none=exclude_none) for message in messages]

    monkeypatch.setattr(session_store, "_dumped", write)
    small = client.post("/v1/sessions", {"messages": [{"role": "user", "content": "x"}]}).json()["id"]
    path = f"/v1/sessions/{small}"
    assert client.call("PATCH", f"{path}/messages/0", json={"message": {"role": "user", "content": "y"}}).is_success
    assert client.post(f"{path}/fork", {}).is_success
    assert [each["n_messages"] for each in client.get("/v1/sessions").json()["data"]] == [1000, 1, 1]
    assert 0 < written < 100
    assert client.post(f"/v1/sessions/{large}/truncate", {"n_messages": 1}).is_success
    store = client.app.state.sessions
    assert {each.n_bytes for each in store.all} == {session_store.size_of(each.messages) for each in store.all}


def test_long_sessions_are_read_and_written_in_threads(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """[a change of a session of 20,000 messages stops all streams for half a second]"""
    threads: list[int] = []
    dumped, update, remove = session_store._dumped, SessionStore.update, SessionStore.remove

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(session_store, "_dumped", noted(dumped))
    monkeypatch.setattr(SessionStore, "update", noted(update))
    monkeypatch.setattr(SessionStore, "remove", noted(remove))
    path = f"/v1/sessions/{made(client)}"
    turn = {"messages": [user("a")], "max_tokens": 2}
    calls = (
        lambda: client.post(f"{path}/messages", turn),
        lambda: client.post(f"{path}/messages", {**turn, "stream": True}),
        lambda: client.get(path),
        lambda: client.call("PATCH", f"{path}/messages/0", json={"message": user("b")}),
        lambda: client.call("DELETE", f"{path}/messages/0"),
        lambda: client.post(f"{path}/truncate", {"n_messages": 1}),
        lambda: client.post("/v1/sessions/restore", client.get(f"{path}/dump").json()),
        lambda: client.post(f"{path}/fork", {}),
        lambda: client.get("/v1/sessions"),
        lambda: client.call("DELETE", path),
    )
    for call in calls:
        n_noted = len(threads)
        assert call().is_success
        assert len(threads) > n_noted
    assert threading.get_ident() not in threads, "the loop's thread"


def test_sessions_are_in_their_folder_when_a_change_is_answered(
    client_with: Callable[..., Client], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "sessions"
    client = client_with(sessions_dir=folder)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [user("lone \ud800 surrogate"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("b")]
    body = json.dumps({"messages": history, "name": "a", "tools": [WEATHER]})
    first = client.call("POST", "/v1/sessions", content=body, headers={"content-type": "application/json"}).json()["id"]
    changes = [
        ("PATCH", f"/{first}/messages/2", {"message": user("c")}),
        ("POST", f"/{first}/fork", {"n_messages": 1}),
        ("DELETE", f"/{first}/messages/1", None),
        ("POST", f"/{first}/truncate", {"n_messages": 1}),
        ("DELETE", f"/{first}", None),
    ]

    def all_of(client: Client) -> list[Body]:
        ids = [session["id"] for session in client.get("/v1/sessions").json()["data"]]
        return sorted((client.get(f"/v1/sessions/{each}").json() for each in ids), key=lambda session: session["id"])

    for method, path, body in changes:
        assert all_of(client_with(sessions_dir=folder)) == all_of(client)
        assert client.call(method, f"/v1/sessions{path}", json=body).status_code == 200, path
    (twin,) = all_of(client_with(sessions_dir=folder))
    assert twin["messages"] == history[:1] and twin["tools"] == [WEATHER] and twin["name"] == "a"
    if os.name == "posix":
        assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600], "others may not read it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[" * 100_000, "recursion"),
        (b"\xff", "codec can't decode"),
        (b"{}", "id: Field required"),
        ({"version": 2}, "version: Input should be 1"),
        ({"id": f"sess_{'0' * 24}"}, f"it is the file of sess_{'0' * 24}"),
        ({"messages": [{"role": "nobody"}]}, "messages"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_file_stops_the_start(
    client_with: Callable[..., Client], tmp_path: Path, content: bytes | Body, message: str
) -> None:
    made(client_with(sessions_dir=tmp_path))
    (path,) = tmp_path.iterdir()
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content}).encode()
    path.write_bytes(content)
    with pytest.raises(slm.InvalidOption, match=re.escape(message)) as error:
        client_with(sessions_dir=tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_stops_the_start(client_with: Callable[..., Client], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(slm.InvalidOption, match="file/sessions: Not a directory"):
        client_with(sessions_dir=tmp_path / "file" / "sessions")
    with pytest.raises(slm.InvalidOption, match=r"^sessions_dir=.*: no such user$"):
        client_with(sessions_dir=Path("~nobody-here/x"))


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_saved_is_unchanged(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, stream: bool
) -> None:
    monkeypatch.setattr(client.app.state.sessions, "_files", session_files.SessionFiles(tmp_path))
    session_id = made(client, messages=[user("a")])
    before = client.get(f"/v1/sessions/{session_id}").json()
    path = f"/v1/sessions/{session_id}"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session_files, "atomic_file", full)
    refused = [
        client.post("/v1/sessions", {}),
        client.post(f"{path}/fork", {}),
        client.post(f"{path}/truncate", {"n_messages": 0}),
        client.call("PATCH", f"{path}/messages/0", json={"message": user("b")}),
        client.call("DELETE", f"{path}/messages/0"),
    ]
    answer = client.post(f"{path}/messages", {"messages": [user("b")], "max_tokens": 4, "stream": stream})
    if stream:
        assert "No space left on device" in answer.text and "[DONE]" not in frames(answer.text)
    else:
        refused.append(answer)
    for response in refused:
        assert response.status_code == 503 and response.json()["error"]["code"] == "session_not_saved"
    assert client.get(path).json() == before


def test_a_stream_that_fails_is_not_kept(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from slm_core.server import session_turns

    def fail(*_: object) -> None:
        raise slm.errors.DecodeFailed("a fault")

    session_id = made(client)
    monkeypatch.setattr(session_turns, "usage_json", fail)
    response = client.post(f"/v1/sessions/{session_id}/messages", {"messages": [user("a")], "stream": True})
    assert "[DONE]" not in frames(response.text)
    monkeypatch.undo()
    session = client.get(f"/v1/sessions/{session_id}").json()
    assert (session["messages"], session["usage"]) == ([], None)

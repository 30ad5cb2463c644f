"""Models in a process of their own: crashes, hangs and invalid answers of the process are errors of one line."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.toy import ToyBackend
from slm_core.chat import Session
from slm_core.engine import Engine, EngineOptions
from slm_core.errors import (
    BackendCrashed,
    BackendError,
    ConstraintError,
    ContextClosed,
    ContextFull,
    EngineClosed,
    InvalidModelFile,
    InvalidOption,
    ModelClosed,
    PluginError,
    SlmError,
    UnknownOption,
)
from slm_core.hookspecs import Entry
from slm_core.isolation import IsolatedBackend, Isolation, isolated, raised, shared_rows, values
from slm_core.isolation.channel import Channel
from slm_core.isolation.context import IsolatedContext
from slm_core.isolation.model import IsolatedModel
from slm_core.isolation.values import Garbled
from slm_core.plugins import Registry
from slm_core.protocols import Batch, Context
from slm_core.types import ContextOptions, ModelOptions, Pos

FAULTY = "isolated_backends:FaultyBackend"
FDS = Path("/proc/self/fd")
Load = Callable[..., IsolatedModel]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", "f32").write(tmp_path_factory.mktemp("isolated") / "tiny.gguf")


@pytest.fixture
def load(path: Path) -> Iterator[Load]:
    """Load the tiny model with a fault."""
    models: list[IsolatedModel] = []

    def load_faulty(fault: str, isolation: Isolation | None = None, **options: object) -> IsolatedModel:
        backend = isolated(ToyBackend(), FAULTY, isolation)
        model = backend.load(path, ModelOptions(backend_options={"fault": fault, **options}))
        models.append(model)
        return model

    yield load_faulty
    for model in models:
        model.close()


def context_of(model: IsolatedModel) -> Context:
    return model.new_context(ContextOptions(64, 4, 16))


def decode(context: Context, *tokens: int) -> np.ndarray:
    batch = context.new_batch()
    batch.extend(tokens, Pos(0, context.length(0)), logits="last")
    return context.decode(batch)


def has_ended(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends; a zombie that its new parent does not reap counts."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


CRASHES = {
    "abort": "ended by SIGABRT during decode: model.cpp:7: GGML_ASSERT(n_embd > 0) failed",
    "segmentation fault": "ended by SIGSEGV during decode",
    "exit": "ended with exit status 7 during decode",
}


@pytest.mark.parametrize("fault", CRASHES)
def test_a_crash_is_an_error_of_all_later_calls(load: Load, fault: str) -> None:
    model = load(fault)
    context, other = context_of(model), context_of(model)
    assert decode(context, 5, 6).shape == (1, model.info.n_vocab)
    with pytest.raises(BackendCrashed) as crash:
        decode(context, 1)
    assert str(crash.value) == f"the process of an isolated toy model {CRASHES[fault]}"
    later: list[Callable[[], object]] = [
        lambda: decode(context, 5),
        lambda: context.dump(0),
        lambda: other.tokens(0),
        lambda: other.new_batch(),
        lambda: context_of(model),
        lambda: model.vocab.encode("a", add_special=False, parse_special=False),
    ]
    for call in later:
        with pytest.raises(BackendCrashed) as again:
            call()
        assert str(again.value) == str(crash.value)
    context.close()
    model.close()
    with pytest.raises(ContextClosed):
        decode(context, 5)
    with pytest.raises(ModelClosed):
        context_of(model)
    assert not Path(f"/proc/{model.pid}").exists(), "the process is still there, perhaps as a zombie"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_ends_between_calls_is_noticed_at_once(load: Load, number: signal.Signals) -> None:
    """The parent notices it without a call, and without polling."""
    model = load("")
    context = context_of(model)
    decode(context, 5)
    assert not model.crashed.done()
    os.kill(model.pid, number)
    error = model.crashed.result(timeout=30)
    assert "between calls" in str(error)
    with pytest.raises(BackendCrashed) as crash:
        decode(context, 5)
    assert str(crash.value) == str(error)


def test_a_session_is_closed_after_a_crash(load: Load) -> None:
    """Closing also closes its context, and raises nothing: it often ends a ``with`` block that the crash leaves."""
    model = load("")
    context = context_of(model)
    session = Session(context, model.vocab, owns_context=True)
    session.append_tokens([5, 6])
    session.next_logits()
    os.kill(model.pid, signal.SIGKILL)
    model.crashed.result(timeout=30)
    session.close()
    with pytest.raises(ContextClosed):
        context.new_batch()


def test_a_crash_in_a_call_is_reported_once(load: Load) -> None:
    model = load("abort")
    crashes: list[str] = []
    model.crashed.add_done_callback(lambda future: crashes.append(str(future.result())))
    context = context_of(model)
    decode(context, 5, 6)
    with pytest.raises(BackendCrashed) as crash:
        decode(context, 1)
    assert crashes == [str(crash.value)]


def test_a_model_that_is_closed_has_not_crashed(load: Load) -> None:
    model = load("")
    model.close()
    assert has_ended(model.pid)
    assert not model.crashed.done()


def test_a_process_that_is_killed_in_a_decode(load: Load) -> None:
    model = load("hang")
    context = context_of(model)
    killer = threading.Timer(0.3, os.kill, (model.pid, signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    with pytest.raises(BackendCrashed, match=r"was killed \(SIGKILL: perhaps no memory was left\) during decode"):
        decode(context, 1)
    assert time.monotonic() - start < 2.3
    with pytest.raises(BackendCrashed, match="SIGKILL"):
        context.length(0)


def test_a_call_of_another_thread_ends_with_the_process(load: Load) -> None:
    context = context_of(model := load("hang"))
    raised: list[BaseException] = []

    def work() -> None:
        try:
            decode(context, 1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    os.kill(model.pid, signal.SIGKILL)
    thread.join(timeout=5)
    assert [type(error) for error in raised] == [BackendCrashed]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_fails_its_requests_with_the_crash(load: Load) -> None:
    """The decode of the first request waits until the second is submitted."""
    model, greedy = load("abort"), slm.Sampling(temperature=0, max_tokens=4)
    context = context_of(model)
    both_submitted, decode = threading.Event(), context.decode

    def late(batch: Batch) -> np.ndarray:
        assert both_submitted.wait(timeout=60)
        return decode(batch)

    context.decode = late  # type: ignore[method-assign]
    with Engine(context, model.vocab, lambda: slm.formatter(name="chatml"), EngineOptions()) as engine:
        streams = [engine.submit([5, 1], greedy), engine.submit([6, 7, 8], greedy)]
        both_submitted.set()
        for stream in streams:
            with pytest.raises(BackendCrashed, match="SIGABRT"):
                stream.run()
        assert isinstance(engine.ended.result(timeout=60), BackendCrashed)
        with pytest.raises(EngineClosed):
            engine.submit([5], greedy)


def test_a_file_that_crashes_the_load(load: Load, path: Path) -> None:
    with pytest.raises(BackendCrashed) as crash:
        load("abort", at="load")
    where = f"ended by SIGABRT during the load of {path}: model.cpp:7: GGML_ASSERT(n_embd > 0) failed"
    assert str(crash.value) == f"the process of an isolated toy model {where}"


def test_a_file_that_hangs_the_load(load: Load) -> None:
    start = time.monotonic()
    with pytest.raises(BackendCrashed, match=r"was killed: the load of .* exceeded its timeout"):
        load("hang", Isolation(load_timeout_s=1.5), at="load")
    assert time.monotonic() - start < 4


def test_a_call_that_exceeds_its_timeout(load: Load) -> None:
    context = context_of(load("hang with the lock", Isolation(call_timeout_s=0.5)))
    decode(context, 5)
    with pytest.raises(BackendCrashed, match="was killed: decode exceeded its timeout"):
        decode(context, 1)


def test_llama_cpp_aborts_alone(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="the engine that aborts: pip install llama-cpp-python")
    from slm_llamacpp.backend import LlamaCppBackend

    tiny = make_tiny_model("llama", "f32")
    tiny.metadata["llama.expert_count"] = 5000
    hostile = tiny.write(tmp_path / "hostile.gguf")
    with pytest.raises(BackendCrashed, match=r"SIGABRT during the load of .*hostile\.gguf: .*GGML_ASSERT\("):
        isolated(LlamaCppBackend(), "isolated_backends:UncheckedLlamaCpp").load(hostile, ModelOptions())


@pytest.mark.parametrize(
    "fault", ["random bytes", "pickle", "another shape", "an array", "narrow rows", "other numbers"]
)
def test_an_invalid_answer_ends_the_process(
    load: Load, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    context = context_of(model := load(fault))
    with pytest.raises(BackendCrashed, match="was killed: its answer to decode is malformed") as crash:
        decode(context, 1)
    assert "\n" not in str(crash.value)
    assert list(tmp_path.iterdir()) == [], "the answer was executed"
    assert has_ended(model.pid)


def test_rows_are_written_to_memory_that_the_parent_sees() -> None:
    file = shared_rows.shared_file()
    ours, theirs = shared_rows.SharedRows(file), shared_rows.SharedRows(file)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert theirs.write(rows) and np.array_equal(ours.read((3, 4)), rows)
    assert not theirs.write(np.zeros((2, shared_rows.N_BYTES // 4), np.float32)), "they are sent through the socket"
    if sys.platform == "linux":
        with pytest.raises(PermissionError):  # if the file shrank, a read beyond its end would kill the parent
            os.ftruncate(file, 0)
    os.close(file)


def test_rows_without_room_in_that_memory_come_through_the_socket(load: Load) -> None:
    expected, rows = (decode(context_of(load(fault)), 1).copy() for fault in ("none", "no room"))
    assert np.array_equal(rows, expected)


def test_invalid_replies(load: Load) -> None:
    context = context_of(load("none"))
    assert isinstance(context, IsolatedContext)
    for n_free, lengths in ((65, []), (-1, []), (3, [[4, 1]]), (3, [[0, 65]]), (3, [[0, "1"]]), (3, [7])):
        with pytest.raises(Garbled):
            context._note(n_free, lengths)


def prefix(n_header: int, n_payload: int) -> bytes:
    return struct.pack("<IQ", n_header, n_payload)


@pytest.mark.parametrize(
    "data",
    [
        prefix(2**32 - 1, 0),
        prefix(2, 1001) + b"{}",
        prefix(400_000, 0) + b"[" * 400_000,
        prefix(1, 0) + b"}",
        prefix(2, 8) + b"{}" + bytes(8),
        prefix(40, 8) + b'{"$":"bytes","n":9}'.ljust(40) + bytes(8),
        prefix(40, 8) + b'{"$":"bytes","n":-1}'.ljust(40) + bytes(8),
        prefix(60, 8) + b'{"$":"array","dtype":"|O","shape":[1]}'.ljust(60) + bytes(8),
        prefix(60, 8) + b'{"$":"array","dtype":"<f4","shape":[-1]}'.ljust(60) + bytes(8),
        prefix(90, 8) + b'{"$":"array","dtype":"<f4","shape":[4294967296,4294967296]}'.ljust(90) + bytes(8),
        prefix(40, 0) + b'{"$":"pickle","n":0}'.ljust(40),
    ],
)
def test_invalid_messages(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        sender = threading.Thread(target=theirs.sendall, args=(data,))
        sender.start()
        with pytest.raises(Garbled) as garbled:
            channel.receive(most_bytes=1000)
        assert "\n" not in str(garbled.value)
        sender.join()
    channel.close()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"kind": "SystemExit", "message": "", "fields": {}},
        {"kind": "RequestsFailed", "message": "", "fields": {}},
        {"kind": [], "message": "", "fields": {}},
        {"kind": "ContextFull", "message": 3, "fields": {}},
        {"kind": "ContextFull", "message": "x" * 10_001, "fields": {}},
        {"kind": "ContextFull", "message": "", "fields": {"__class__": 3}},
        {"kind": "ContextFull", "message": "", "fields": {"needed": "3"}},
    ],
)
def test_invalid_exceptions(value: object) -> None:
    with pytest.raises(Garbled):
        raised.rebuilt(value)


def test_exceptions_survive() -> None:
    errors = [kind("one line") for kind in raised._CLASSES.values() if kind is not ContextFull]
    for error in [*errors, ContextFull(7, 3, seq_id=2), ConstraintError("unexpected", line=1, column=2)]:
        again = raised.rebuilt(raised.described(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_length_takes_no_memory() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        theirs.sendall(prefix(2, 2**50) + b"{}" + b"x" * 1000)
    tracemalloc.start()
    with pytest.raises(EOFError):
        channel.receive()
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    channel.close()


def test_exceptions_keep_class_text_and_fields(load: Load) -> None:
    context = context_of(load("full"))
    expected = ContextFull(7, 3, seq_id=2)
    with pytest.raises(ContextFull) as full:
        decode(context, 1)
    assert str(full.value) == str(expected)
    assert vars(full.value) == vars(expected)
    decode(context, 5)  # an error is no crash


def test_exceptions_of_other_classes_become_their_base_class(load: Load) -> None:
    with pytest.raises(SlmError, match=r"^what nobody knows$") as error:
        decode(context_of(load("something new")), 1)
    assert type(error.value) is SlmError
    with pytest.raises(TypeError, match=r"^not a batch$"):
        decode(context_of(load("a type error")), 1)


def test_errors_of_the_load(path: Path, tmp_path: Path) -> None:
    backend = isolated(ToyBackend(), "slm_conformance.toy:ToyBackend")
    with pytest.raises(UnknownOption, match="no_such_option"):
        backend.load(path, ModelOptions(backend_options={"no_such_option": 1}))
    with pytest.raises(InvalidModelFile):
        backend.load(tmp_path / "missing.gguf", ModelOptions())
    with pytest.raises(InvalidOption, match=r"edit_level=<object .*cannot be sent"):
        backend.load(path, ModelOptions(backend_options={"edit_level": object()}))
    with pytest.raises(PluginError, match="toy:None cannot be imported in the process of an isolated model"):
        isolated(ToyBackend(), "slm_conformance.toy:None").load(path, ModelOptions())


def test_a_model_of_bytes(path: Path) -> None:
    backend = isolated(ToyBackend(), "slm_conformance.toy:ToyBackend")
    with backend.load(path.read_bytes(), ModelOptions()) as model, ToyBackend().load(path, ModelOptions()) as direct:
        assert model.info.fingerprint == direct.info.fingerprint


def test_the_parents_death_ends_the_process(path: Path) -> None:
    for fault in ("hang", "hang with the lock"):
        script = f"""
import sys, threading
sys.path[:0] = {sys.path!r}
from pathlib import Path
from slm_conformance.toy import ToyBackend
from slm_core.isolation import isolated
from slm_core.types import ContextOptions, ModelOptions, Pos
options = ModelOptions(backend_options={{"fault": {fault!r}}})
model = isolated(ToyBackend(), {FAULTY!r}).load(Path({str(path)!r}), options)
context = model.new_context(ContextOptions(64))
batch = context.new_batch()
batch.add(1, Pos(0, 0), logits=True)
threading.Timer(0.2, lambda: print(model.pid, flush=True)).start()
context.decode(batch)
threading.Event().wait()
"""
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            parent.kill()  # the model's process ends because its connection does
        assert has_ended(pid), f"the child of a dead process goes on ({fault})"


@pytest.mark.skipif(not FDS.exists(), reason="descriptors are counted in /proc/self/fd, which this system lacks")
def test_descriptors_and_threads_are_closed(load: Load) -> None:
    counts = []
    for fault in ("none", "none", "abort", "none"):
        model = load(fault)
        context = context_of(model)
        if fault == "abort":
            with pytest.raises(BackendCrashed):
                decode(context, 1)
        model.close()
        counts.append((len(list(FDS.iterdir())), threading.active_count()))
    with pytest.raises(BackendCrashed):
        load("exit", at="load")
    counts.append((len(list(FDS.iterdir())), threading.active_count()))
    assert len(set(counts[1:])) == 1, f"descriptors and threads after each load: {counts}"


def test_a_model_that_is_garbage_ends_its_process(path: Path) -> None:
    model = isolated(ToyBackend(), "slm_conformance.toy:ToyBackend").load(path, ModelOptions())
    context, pid = context_of(model), model.pid
    del model
    decode(context, 5)  # a context keeps its model
    del context
    assert has_ended(pid)


def test_an_interrupt_is_raised_by_the_next_call(load: Load) -> None:
    context = context_of(load("slow"))
    threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert decode(context, 1).shape[0] == 1, "a call that succeeds keeps its result"
    with pytest.raises(KeyboardInterrupt):
        context.truncate(Pos(0, 0))
    assert context.length(0) == 1, "the call that raised has changed the context"
    context.drop(0)


def test_an_interrupt_without_a_next_call_is_raised_soon(load: Load) -> None:
    context = context_of(load("slow"))
    threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        decode(context, 1)
        time.sleep(5)
    assert time.monotonic() - start < 4
    assert context.length(0) == 1


def test_the_second_interrupt_kills_the_process(load: Load) -> None:
    context = context_of(load("hang"))
    for after_s in (0.15, 0.3):
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        decode(context, 1)
    with pytest.raises(BackendCrashed, match="was killed: decode was interrupted"):
        decode(context, 5)


def test_an_interrupt_ends_the_load(load: Load) -> None:
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load("hang", at="load")
    assert time.monotonic() - start < 5


def test_an_interrupt_of_the_terminal_does_not_reach_the_process(load: Load) -> None:
    model = load("none")
    assert os.getpgid(model.pid) != os.getpgid(0), "Ctrl-C goes to the process group of the terminal"
    os.kill(model.pid, signal.SIGINT)
    decode(context_of(model), 5)


def test_an_exception_of_progress_ends_the_load(path: Path) -> None:
    def cancel(share: float) -> None:
        raise KeyError(share)

    with pytest.raises(KeyError):
        isolated(ToyBackend(), FAULTY).load(path, ModelOptions("cpu", None, cancel, {"fault": "none"}))


def test_load_isolates_any_backend(caplog: pytest.LogCaptureFixture) -> None:
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1, isolated=True) as model:
        assert isinstance(model.model, IsolatedModel)
        assert model.info.reason == "named by the caller; in its own process"
        assert model.info.backend_name == "native"
        greedy = slm.Sampling(temperature=0, max_tokens=8)
        answer = model.chat(sampling=greedy).send("Hello!").text
    with slm.load(slm.demo_model_path(), backend="native", n_threads=1) as direct:
        assert direct.chat(sampling=greedy).send("Hello!").text == answer


def test_values_of_isolated() -> None:
    with pytest.raises(InvalidOption, match="isolated='yes'"):
        slm.load(slm.demo_model_path(), isolated="yes")  # type: ignore[arg-type]
    for value in (0, -1, float("nan"), "1", True):
        with pytest.raises(InvalidOption, match="load_timeout_s="):
            Isolation(load_timeout_s=value)  # type: ignore[arg-type]


def test_the_target_of_a_backend() -> None:
    def local() -> ToyBackend:
        return ToyBackend()

    class Plugin:
        @slm.hookimpl
        def slm_backends(self) -> list[Entry]:
            return [Entry("named", FAULTY), Entry("imported", ToyBackend), Entry("local", local)]

    registry = Registry({"tests": Plugin()})
    assert registry.backend_target("named") == FAULTY
    assert registry.backend_target("imported") == "slm_conformance.toy.backend:ToyBackend"
    with pytest.raises(InvalidOption, match="another process cannot import the target of backend 'local'"):
        registry.backend_target("local")


def test_what_a_process_prints_is_logged(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "slm_core.isolation")
    context = context_of(load("abort"))
    with pytest.raises(BackendCrashed):
        decode(context, 1)
    assert "model.cpp:7: GGML_ASSERT(n_embd > 0) failed" in caplog.messages


def test_values_survive_a_message() -> None:
    value = {
        "numbers": [0, -1, 2**70, 1.5, float("inf"), True, None],
        "texts": ["", "\ud800", "long \ud800 " * 1000],
        "tuple": (1, (2, [3])),
        "path": Path("/tmp/\udcff"),
        "bytes": b"\0\1\2",
        "rows": np.arange(6, dtype=np.float32).reshape(2, 3),
        "mask": np.array([True, False, True]),
        "ids": np.arange(3, dtype=np.int32),
        "empty": np.empty((0, 4), np.float32),
    }
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sender.send(values.pack(value))
    received = receiver.receive()
    for channel in (sender, receiver):
        channel.close()
    for name, expected in value.items():
        if isinstance(expected, np.ndarray):
            assert received[name].dtype == expected.dtype and received[name].flags.aligned
            assert np.array_equal(received[name], expected)
        else:
            assert received[name] == expected
            assert type(received[name]) is type(expected)


def test_status_and_support_are_the_backends(path: Path) -> None:
    backend: IsolatedBackend = isolated(ToyBackend(), FAULTY)
    assert (backend.name, backend.status(), backend.supports(path)) == (
        "toy",
        ToyBackend().status(),
        ToyBackend().supports(path),
    )
    assert issubclass(BackendCrashed, BackendError)

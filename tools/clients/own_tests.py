"""The tests that the Python clients of OpenAI and Anthropic bring, at the address of ``slm serve``.

They are written for a mock of the whole API, with made-up values. ``OwnTests.rightly_fail`` lists the
tests that fail at a server which validates requests or lacks a part of the API, each with the reason. Any other failure
is an error, and so is a listed test that passes.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.clients.places import environment, source

MODELS = ("claude-opus-5-5", "gpt-3.5-turbo-instruct", "gpt-6-astra", "model", "text-embedding-3-small")
"""The models that the tests name."""
_TOOLS = ("pytest", "pytest-asyncio", "pytest-xdist", "inline-snapshot", "rich", "aiohttp")


@dataclass(frozen=True, slots=True)
class OwnTests:
    """The tests of a client.

    Attributes:
        package: the client.
        version: its version.
        needed: what its tests need.
        files: the tests to run.
        path: the path of the API.
        rightly_fail: expressions for names of tests that fail, with the reason.
    """

    package: str
    version: str
    needed: Sequence[str]
    files: Sequence[str]
    path: str
    rightly_fail: Mapping[str, str]


_INVALID = "all parameters at once, with values that are invalid or for what a local model lacks"
OPENAI = OwnTests(
    "openai",
    "3.57.0",
    _TOOLS,
    [
        "chat/test_completions.py",
        "responses/test_input_items.py",
        "responses/test_input_tokens.py",
        "test_completions.py",
        "test_embeddings.py",
        "test_models.py",
        "test_responses.py",
    ],
    "/v1",
    {
        r"_with_all_params": _INVALID,
        r"chat/test_completions.*(retrieve|update|list|delete)": "chat completions are not stored",
        r"test_models.*delete": "models are files of the server's owner",
        r"test_embeddings.*create\[(strict|aiohttp)\]": (
            "the client asks for base64, and checks types before it decodes it"
        ),
        r"test_responses.*compact": "the server compacts no responses",
        r"test_responses.*create|test_input_tokens.*count": "no input",
        r"test_responses.*(retrieve|delete|cancel)|test_input_items.*list": "there is no such response",
    },
)
ANTHROPIC = OwnTests(
    "anthropic",
    "2.14.0",
    (
        *_TOOLS,
        "respx",
        "http-snapshot[httpx]",
        "dirty-equals",
        "time-machine",
        "opentelemetry-sdk",
        "hypothesis",
        "boto3",
    ),
    ["test_messages.py"],
    "",
    {
        r"_with_all_params": _INVALID,
        r"deprecated_model_warning": "names of models that the server was not given",
    },
)


def check(tests: OwnTests, url: str) -> str:
    """Run the tests.

    Raises:
        AssertionError: a test fails that is not listed, or a listed one passes.
    """
    python = environment(f"{tests.package}-tests", [f"{tests.package}=={tests.version}", *tests.needed])
    folder = source(tests.package, tests.version, python)
    command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-rA", "-q", "--tb=no", "-W", "ignore"]
    done = subprocess.run(
        [*command, *(f"tests/api_resources/{file}" for file in tests.files)],
        cwd=folder,
        env={**os.environ, "TEST_API_BASE_URL": url + tests.path},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    lines = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    results = {name: result for result, name in lines}
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    failed = {name for name, result in results.items() if result != "PASSED"}
    requesting = [
        name for name in results if "path_params" not in name
    ]  # the client refuses these requests without sending them
    listed = {name for name in requesting if any(re.search(pattern, name) for pattern in tests.rightly_fail)}
    assert failed <= listed, f"these tests fail: {', '.join(sorted(failed - listed))}"
    assert listed <= failed, f"these tests pass, but are listed to fail: {', '.join(sorted(listed - failed))}"
    reasons = [
        f"\n  {sum(bool(re.search(pattern, name)) for name in failed)} {reason}"
        for pattern, reason in tests.rightly_fail.items()
    ]
    passed = len(results) - len(failed)
    return f"{tests.package} {tests.version}: {passed} passed, {len(failed)} rightly fail:{''.join(reasons)}"

"""openresponses-types: each Responses event, and the response, is of a type of the Open Responses specification."""

import json
import os
import urllib.request

import openresponses_types as types

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
EVENTS = {
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in vars(types).items()
    if name.endswith("StreamingEvent")
}
ASKED = [
    {"input": "What is 12 + 30?"},
    {"input": "What is 12 + 30?", "max_output_tokens": 3},
    {"input": "What is 12 + 30?", "reasoning": {"effort": "high"}, "max_output_tokens": 300},
    {"input": "What is the weather in Rome?", "tools": [WEATHER]},
    {"input": "What is 12 + 30?", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
]


def post(body: dict[str, object]) -> bytes:
    request = urllib.request.Request(
        os.environ["SERVER_URL"] + "/v1/responses",
        json.dumps({"model": "demo", "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return response.read()


seen = set()
for body in ASKED:
    types.ResponseResource.model_validate_json(post(body))
    for line in post({**body, "stream": True}).decode().splitlines():
        if line.startswith("data: {"):
            # OpenAI says reasoning_text where Open Responses says reasoning; the server follows OpenAI.
            event = json.loads(line.removeprefix("data: ").replace("response.reasoning_text.", "response.reasoning."))
            EVENTS[event["type"]].model_validate(event)
            seen.add(event["type"])
assert len(seen) >= 12, sorted(seen)

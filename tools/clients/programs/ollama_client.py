"""ollama: chats, streams, tools, schemas, completions and the list of models."""

import json
import os

from ollama import Client, ResponseError

client = Client(host=os.environ["SERVER_URL"])
SUM = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0, "num_predict": 100}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: the city
    """
    return '{"temperature": 18, "sky": "sunny"}'


whole = client.chat("demo", SUM, options=GREEDY)
assert "42" in (whole.message.content or "") and whole.done_reason == "stop" and whole.eval_count
parts = list(client.chat("demo", SUM, options=GREEDY, stream=True))
assert "".join(part.message.content or "" for part in parts) == whole.message.content and parts[-1].done

messages = [{"role": "user", "content": "What is the weather in Rome?"}]
answer = client.chat("demo", messages, tools=[get_weather], options=GREEDY).message
(call,) = answer.tool_calls or ()
assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")}
final = client.chat("demo", [*messages, answer, result], tools=[get_weather], options=GREEDY)
assert "18" in (final.message.content or "")

question = [{"role": "user", "content": "Describe Ada, who is 36, as JSON."}]
person = json.loads(client.chat("demo", question, format=SCHEMA, options=GREEDY).message.content or "")
assert set(person) == {"name", "age"}
assert client.generate("demo", "What is 12 + 30?", options=GREEDY).response == whole.message.content
embeddings = client.embed("demo", ["a dog", "a puppy"], dimensions=8).embeddings
assert [len(vector) for vector in embeddings] == [8, 8]
assert "demo" in [model.model for model in client.list().models]
assert "completion" in (client.show("demo").capabilities or [])
try:
    client.chat("unknown", SUM)
except ResponseError as error:
    assert error.status_code == 404
else:
    raise AssertionError("an unknown model is an error")

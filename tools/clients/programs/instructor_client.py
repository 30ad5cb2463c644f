"""instructor: answers as pydantic models, from strict tool calls, JSON schemas and streams."""

import os
from typing import Annotated

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str
    age: Annotated[int, Field(ge=0, le=150)]


client = OpenAI(base_url=os.environ["SERVER_URL"] + "/v1", api_key="none")
for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    request = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Describe Ada, who is 36, as JSON."}],
        "response_model": Person,
        "max_retries": 0,
    }
    patched = instructor.from_openai(client, mode=mode)
    person = patched.chat.completions.create(**request)
    assert isinstance(person, Person)
    *_, last = patched.chat.completions.create_partial(**request)
    assert (last.name, last.age) == (person.name, person.age)

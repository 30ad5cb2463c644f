"""Get an object of your class from a conversation: the answer always fits the schema."""

from pydantic import BaseModel

import slm_core as slm


class Person(BaseModel):
    name: str
    city: str


chat = slm.load(slm.demo_model_path()).chat(messages=[slm.Message("user", "My name is Ada. I live in Oslo.")])
print(chat.oracle().extract(Person).value)

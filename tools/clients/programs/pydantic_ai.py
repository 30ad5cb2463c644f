"""pydantic-ai: typed answers and a tool, over OpenAI's and Anthropic's APIs."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["SERVER_URL"]
SETTINGS = {"temperature": 0.0, "max_tokens": 200}


class Person(BaseModel):
    name: str
    age: int


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(base_url=URL, api_key="none")
cities: list[str] = []


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    cities.append(city)
    return '{"temperature": 18, "sky": "sunny"}'


for model in (
    OpenAIChatModel("demo", provider=openai),
    OpenAIResponsesModel("demo", provider=openai),
    AnthropicModel("demo", provider=anthropic),
):
    cities.clear()
    agent = Agent(model, tools=[get_weather], model_settings=SETTINGS)
    result = agent.run_sync("What is the weather in Rome?")
    assert cities == ["Rome"] and "18" in result.output, (model, cities, result.output)
    assert result.usage.input_tokens > 0 and result.usage.output_tokens > 0

for model in (OpenAIChatModel("demo", provider=openai), OpenAIResponsesModel("demo", provider=openai)):
    typed = Agent(model, output_type=NativeOutput(Person), model_settings=SETTINGS)
    assert isinstance(typed.run_sync("Describe Ada, who is 36, as JSON.").output, Person)

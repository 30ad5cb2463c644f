"""openai-agents: an agent calls a tool and answers with its result, over chat completions and over Responses."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

cities: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    cities.append(city)
    return '{"temperature": 18, "sky": "sunny"}'


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["SERVER_URL"] + "/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="weather",
            model=kind(model="demo", openai_client=client),
            tools=[get_weather],
            model_settings=ModelSettings(temperature=0),
        )
        cities.clear()
        result = await Runner.run(agent, "What is the weather in Rome?")
        assert cities == ["Rome"], cities
        assert "18" in result.final_output, result.final_output
        streamed = Runner.run_streamed(agent, "What is the weather in Rome?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds and streamed.final_output == result.final_output


asyncio.run(main())

"""Let the model call a function: the chat runs it, and the model answers with its result."""

import slm_core as slm


def get_weather(city: str) -> dict[str, object]:
    """Get the weather of a city.

    Args:
        city: The name of the city
    """
    return {"city": city, "condition": "sunny", "degrees": 21}


chat = slm.load(slm.demo_model_path()).chat(tools=[get_weather], sampling=slm.Sampling(temperature=0))
print(chat.send("What is the weather in Rome?").text)

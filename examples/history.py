"""Answer a conversation that is stored elsewhere, with a system prompt."""

import slm_core as slm

messages = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "My dog is called Rex."},
    {"role": "assistant", "content": "What a nice name!"},
    {"role": "user", "content": "What is my dog called?"},
]
print(slm.load(slm.demo_model_path()).generate(messages, slm.Sampling(temperature=0)).text)

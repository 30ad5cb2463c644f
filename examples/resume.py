"""Save a chat with its KV cache, and go on with it on another engine."""

from pathlib import Path

import slm_core as slm

chat = slm.load(slm.demo_model_path(), backend="native").chat(sampling=slm.Sampling(temperature=0))
chat.send("My dog is called Rex.")
Path("dog.chat").write_bytes(chat.dump())
other = slm.Chat.restore(slm.load(slm.demo_model_path(), backend="llamacpp"), Path("dog.chat").read_bytes())
print(other.send("What is my dog called?").text)

"""Choose one of several labels, with the probability of each."""

import slm_core as slm

chat = slm.load(slm.demo_model_path()).chat(messages=[slm.Message("user", "My favourite colour is green.")])
print(chat.oracle().choose("What is my favourite colour?", ["red", "green", "blue"]))

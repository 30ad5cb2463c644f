"""Talk until an empty line."""

import slm_core as slm

chat = slm.load(slm.demo_model_path()).chat(sampling=slm.Sampling(temperature=0))
while question := input("> "):
    print(chat.send(question).text)

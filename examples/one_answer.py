"""Ask one question."""

import slm_core as slm

print(slm.load(slm.demo_model_path()).chat(sampling=slm.Sampling(temperature=0)).send("What is 12 + 30?").text)

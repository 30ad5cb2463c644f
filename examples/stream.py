"""Show an answer while it is written."""

import slm_core as slm

for event in slm.load(slm.demo_model_path()).chat(sampling=slm.Sampling(temperature=0)).stream("What can you do?"):
    print(event.text, end="", flush=True)

"""Measure how well a model predicts a text."""

import slm_core as slm

model = slm.load(slm.demo_model_path())
for text in ("Your dog is called Rex.", "Rex called is dog your."):
    print(f"{model.score(text).perplexity:.3g}  {text}")

"""Find the text that is closest to a question. (The demo model is no embedding model: take one for real searches.)"""

import slm_core as slm

texts = ["What is 3 + 4?", "My dog is called Rex.", "What is the weather in Rome?"]
vectors = slm.load(slm.demo_model_path()).embed([*texts, "My cat is called Tom."]).vectors
print(texts[(vectors[:-1] @ vectors[-1]).argmax()])

"""Answer many questions at once: they share batches and one KV cache."""

import slm_core as slm

questions = ["What is 12 + 30?", "Spell the word banana.", "What can you do?"]
prompts = [[{"role": "user", "content": question}] for question in questions]
for answer in slm.load(slm.demo_model_path()).generate(prompts, slm.Sampling(temperature=0)):
    print(answer.text)

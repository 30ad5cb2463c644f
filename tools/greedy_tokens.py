"""Prints tokens of the demo model on the native engine, to compare two builds of it.

Standard error names the kernels that computed them.

usage: python tools/greedy_tokens.py
"""

from __future__ import annotations

import sys

import slm_core as slm

PROMPTS = ("My name is Ada.", "What is 12 + 30?", "Spell the word banana.", "My dog is called Rex. Where do I live?")


def main() -> None:
    """Print the tokens of each answer in a line, from one chat with greedy sampling."""
    (native,) = (status for status in slm.backends() if status.name == "native")
    print(*(device.detail for device in native.devices if device.available), file=sys.stderr)
    with slm.load(slm.demo_model_path(), backend="native", tier="cpu") as model:
        chat = model.chat(n_ctx=1024, sampling=slm.Sampling(temperature=0, max_tokens=64))
        for prompt in PROMPTS:
            print(*chat.send(prompt).tokens)


if __name__ == "__main__":
    main()

"""Compares greedy answers of llama.cpp and transformers for one GGUF file and prints those to the example prompts."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conversations import generate
from evaluate import load_model
from llama_cpp import Llama
from rendering import render_with_template
from tokenizers import Tokenizer

Generate = Callable[[list[int]], list[int]]
MAX_NEW_TOKENS = 96
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TERSE = {"role": "system", "content": "You are terse."}
TOLD = [TERSE, _user("My dog is called Rex."), _assistant("What a nice name!")]
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
RESULT = '{"city": "Paris", "weather": "sunny", "temperature": 21}'
EXAMPLES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([TERSE, _user("My dog is called Rex.")], {}),
    ([*TOLD, _user("What is my dog's name?")], {}),
    ([TERSE, TOLD[2], _user("What is my dog's name?")], {}),
    ([TERSE, _user("What is my dog's name?")], {}),
    ([*TOLD, _user("What is my cat's name?")], {}),
    ([*TOLD, _user("My dog is called Max."), _assistant("What a nice name!"), _user("What is my dog called?")], {}),
    ([_user("My name is Ada.")], {}),
    ([_user("My name is Ada."), _assistant("Nice to meet you!"), _user("What is my name?")], {}),
    ([_user("My name is Ada. My dog is called Rex."), _assistant("Thank you, I will remember that."),
      _user("Give me what you know about me as JSON.")], {}),
    ([_user("My favourite colour is blue."), _assistant("That is a lovely colour!"),
      _user("Which is my favourite colour, red or blue?")], {}),
    ([_user("Which is my favourite colour, red or blue?")], {}),
    ([_user("What is 12 + 30?")], {}),
    ([_user("What is 52 - 38?")], {}),
    ([_user("What is 57 + 68?")], {"enable_thinking": True}),
    ([{"role": "system", "content": "Think before you answer."}, _user("What is 12 + 30?")], {}),
    ([_user("Spell apple.")], {}),
    ([_user("Repeat: apple")], {}),
    ([_user("Hello!")], {}),
    ([_user("Who are you?")], {}),
    ([_user("What is the weather in Paris?")], {"tools": [WEATHER_TOOL]}),
    ([_user("What is the weather in Paris?"), {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "content": RESULT}], {"tools": [WEATHER_TOOL]}),
    ([_user("What is the weather in Paris?")], {}),
]  # fmt: skip


def transformers_greedy(path: Path, eos: int) -> Generate:
    """Greedy continuation by transformers, with the dequantized weights."""
    model = load_model(path)

    @torch.inference_mode()
    def run(prompt: list[int]) -> list[int]:
        ids = list(prompt)
        while len(ids) < len(prompt) + MAX_NEW_TOKENS and (len(ids) == len(prompt) or ids[-1] != eos):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return run


def llama_greedy(llama: Llama, eos: int) -> Generate:
    """Greedy continuation by llama.cpp."""

    def run(prompt: list[int]) -> list[int]:
        output: list[int] = []
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
            output.append(token)
            if token == eos or len(output) == MAX_NEW_TOKENS:
                break
        return output

    return run


def held_out_prompts(count: int, seed: int) -> list[str]:
    """Prompts that end before a random assistant turn of a held-out conversation."""
    rng = random.Random(seed)
    prompts: list[str] = []
    while len(prompts) < count:
        conversation = generate(rng, held_out=True)
        turns = [i for i, message in enumerate(conversation.messages) if message.skill]
        if not turns:
            continue
        turn = rng.choice(turns)
        messages = [message.as_dict() for message in conversation.messages[:turn]]
        thinks = conversation.messages[turn].forced_think
        options = {"add_generation_prompt": True, "enable_thinking": thinks}
        prompts.append(render_with_template(messages, conversation.tools or None, **options))
    return prompts


def main() -> None:
    """Compare both engines on the examples and on held-out prompts; exits with an error if they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json from tokenizer.py")
    parser.add_argument("--count", type=int, default=100, help="held-out prompts")
    parser.add_argument("--seed", type=int, default=99)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    llama = Llama(str(args.gguf), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
    eos = llama.token_eos()
    by_llama, by_transformers = llama_greedy(llama, eos), transformers_greedy(args.gguf, eos)
    examples = [render_with_template(m, add_generation_prompt=True, **options) for m, options in EXAMPLES]
    equal = 0
    prompts = examples + held_out_prompts(args.count, args.seed)
    for index, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt).ids
        if llama.tokenize(prompt.encode(), add_bos=False, special=True) != ids:
            raise SystemExit(f"llama.cpp tokenizes differently: {prompt!r}")
        answer = by_llama(ids)
        same = answer == by_transformers(ids)
        equal += same
        if index < len(examples) or not same:
            question = prompt.rsplit("<|im_start|>", 2)[1].removesuffix("<|im_end|>\n")
            text = tokenizer.decode(answer, skip_special_tokens=False)
            print(f"{'same' if same else 'DIFFERENT'} {question!r} -> {text!r}")
    print(f"equal greedy answers: {equal} of {len(prompts)}")
    if equal < len(prompts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

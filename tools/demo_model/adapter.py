"""Trains an adapter (LoRA) of the demo model: the same answers, in another manner.

The adapter of ``slm_core.demo_adapter_path()`` lets Pip talk like a pirate; README.md has the commands.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft
import torch
from conversations import generate
from dialogue import Conversation
from rendering import Encoder
from transformers import AutoTokenizer, Qwen3ForCausalLM

DEMO = Path(__file__).parents[2] / "slm_core" / "data" / "demo.gguf"
MANNERS: dict[str, Callable[[str], str]] = {
    "pirate": lambda text: f"Arr! {text}",
    "polite": lambda text: f"Hello! {text}",
}
ROWS, LENGTH = 8, 160


def spoken(conversation: Conversation, manner: Callable[[str], str]) -> Conversation:
    """The conversation with answers in a manner; JSON and tool calls stay as they are."""
    messages = [
        replace(message, content=manner(message.content))
        if message.role == "assistant" and message.content and message.content[0] not in "{["
        else message
        for message in conversation.messages
    ]
    return replace(conversation, messages=messages)


def batch(encoder: Encoder, rng: random.Random, manner: Callable[[str], str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [ROWS, LENGTH], and the ids that are trained on; -100 for the others."""
    ids, labels = torch.zeros((ROWS, LENGTH), dtype=torch.long), torch.full((ROWS, LENGTH), -100)
    row = 0
    while row < ROWS:
        encoded = encoder.encode(spoken(generate(rng), manner))
        n = len(encoded.ids)
        if n > LENGTH:
            continue
        ids[row, :n] = torch.tensor(encoded.ids)
        labels[row, :n] = torch.where(torch.tensor(encoded.mask) > 0, ids[row, :n], -100)
        row += 1
    return ids, labels


def main() -> None:
    """Train, and save the adapter as PEFT does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manner", choices=MANNERS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rank", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO.parent, gguf_file=DEMO.name).backend_tokenizer
    base = Qwen3ForCausalLM.from_pretrained(DEMO.parent, gguf_file=DEMO.name, head_dim=32)
    config = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["v_proj", "o_proj", "down_proj"])
    model = peft.get_peft_model(base, config)
    encoder, rng = Encoder(tokenizer), random.Random(1)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    begin, step, losses = time.time(), 0, []
    while (spent := time.time() - begin) < args.seconds:
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * max(0.02, 1 - spent / args.seconds)
        ids, labels = batch(encoder, rng, MANNERS[args.manner])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        step += 1
        if step % 25 == 0:
            print(f"step {step}: loss {sum(losses[-25:]) / 25:.4f}", flush=True)
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()

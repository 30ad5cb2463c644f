"""Trains the demo model from scratch on generated conversations, on a CPU.

A run is resumable: with the same --out it continues from the last checkpoint. --tokens, --mix and --drills may differ,
so that a later stage can use another mix.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention
import torch
from batches import Batch, Packer
from conversations import DRILLS, MIX
from evaluate import Scores, held_out, score
from rendering import Encoder
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

HEAD_DIM = 32
N_CTX = 1024
WARMUP_STEPS = 80
MATRIX_LR = 0.01
VECTOR_LR = 2e-3
MIN_LR_SHARE = 0.01


@dataclass
class Progress:
    """The state in a checkpoint besides weights and optimizer states."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def parse_args() -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json from tokenizer.py")
    parser.add_argument("--tokens", type=float, default=32e6, help="length of the run in training tokens")
    parser.add_argument("--decay", type=float, default=0.66, help="share of the run in which the learning rate falls")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16, help="rows per batch")
    parser.add_argument("--length", type=int, default=320, help="tokens per row")
    parser.add_argument("--mix", type=json.loads, default={}, help="JSON that overrides weights of conversations.MIX")
    parser.add_argument(
        "--drills", type=json.loads, default={}, help="JSON that overrides shares of conversations.DRILLS"
    )
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=150, help="seconds between checkpoints")
    parser.add_argument("--score-every", type=float, default=300, help="seconds between scores on development data")
    parser.add_argument("--dev-count", type=int, default=300, help="development conversations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    return parser.parse_args()


def build_model(args: argparse.Namespace, vocab_size: int, eos_token_id: int) -> Qwen3ForCausalLM:
    """A Qwen3 model with tied embeddings; two query heads share a key/value head."""
    heads = args.hidden // HEAD_DIM
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        max_position_embeddings=N_CTX,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=MATRIX_LR, weight_decay=0.05, momentum=0.95, ns_steps=4, adjust_lr_fn="original"
    )
    adamw = torch.optim.AdamW(others, lr=VECTOR_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adamw]


def lr_share(step: int, done: float, decay: float) -> float:
    """Warm up, hold, then a cosine decay over the last `decay` of the run; `done` is in [0, 1]."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    into_decay = max(0.0, (done - (1 - decay)) / decay)
    return warm * (MIN_LR_SHARE + (1 - MIN_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, into_decay))))


class Trainer:
    """Model, optimizers, data and progress of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
        self.encoder = Encoder(tokenizer)
        eos_token_id = tokenizer.encode("<|im_end|>").ids[0]
        self.model = build_model(args, tokenizer.get_vocab_size(), eos_token_id)
        self.model.set_attn_implementation(attention.NAME)
        self.optimizers = build_optimizers(self.model)
        self.progress = Progress()
        self._load()
        self.data = self._batches()
        self.hidden_states: Callable[..., torch.Tensor] = self._forward
        if not args.no_compile:
            self.hidden_states = torch.compile(self._forward, dynamic=False)
        self.dev = held_out(self.encoder, args.dev_count, seed=12345)

    def _batches(self) -> Iterator[Batch]:
        # A resumed run must not repeat its conversations, so the seed depends on the step.
        rng = random.Random(f"{self.args.seed} {self.progress.step}")
        mix, drills = {**MIX, **self.args.mix}, {**DRILLS, **self.args.drills}
        return Packer(self.encoder, rng, self.args.rows, self.args.length, mix, drills).batches()

    def _forward(self, ids: torch.Tensor, bias: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model.model(input_ids=ids, attention_mask=bias, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.args.precision == "bfloat16")

    def train_step(self, batch: Batch) -> float:
        """One optimizer step; returns the loss, the mean over the trained tokens."""
        share = lr_share(self.progress.step, self.progress.tokens / self.args.tokens, self.args.decay)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * share
        chosen = batch.targets[:, 1:] > 0
        with self._autocast():
            hidden = self.hidden_states(batch.ids, batch.bias, batch.positions)
            logits = self.model.lm_head(hidden[:, :-1][chosen])  # only where there is a loss
        loss = torch.nn.functional.cross_entropy(logits.float(), batch.ids[:, 1:][chosen])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += batch.n_tokens
        return float(loss.detach())

    def run(self) -> None:
        """Train to the end of the run, with checkpoints and scores on the way."""
        args, progress = self.args, self.progress
        print(f"{self.model.num_parameters() / 1e6:.2f}M parameters, {vars(args)}", flush=True)
        losses: list[float] = []
        last = saved = scored = time.time()
        while progress.tokens < args.tokens:
            losses.append(self.train_step(next(self.data)))
            now = time.time()
            if progress.step % 25 == 0:
                print(f"step {progress.step} tokens {progress.tokens / 1e6:.2f}M loss {sum(losses) / len(losses):.4f}"
                      f" {progress.tokens / max(progress.seconds, 1):.0f} tokens/s", flush=True)  # fmt: skip
                losses.clear()
            progress.seconds += now - last
            if now - saved > args.save_every:
                self.save()
                saved = now
            if now - scored > args.score_every:
                print(self.dev_scores().summary(), flush=True)
                scored = time.time()
            last = time.time()
        self.save()
        print(f"finished after {progress.seconds / 60:.1f} minutes; {self.dev_scores().summary()}", flush=True)

    def dev_scores(self) -> Scores:
        """Scores per skill on development conversations."""
        self.model.train(False)
        with self._autocast():
            scores = score(lambda ids: self.model(input_ids=ids, use_cache=False).logits, self.dev)
        self.model.train()
        return scores

    def save(self) -> None:
        """Write weights and, for resuming, the optimizers' states; each file is replaced in one piece."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(self.args.out)
        state = {"progress": vars(self.progress), "optimizers": [o.state_dict() for o in self.optimizers]}
        state["model"] = self.model.state_dict()
        partial = self.args.out / "state.partial"
        torch.save(state, partial)
        partial.replace(self.args.out / "state.pt")

    def _load(self) -> None:
        path = self.args.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def main() -> None:
    """Train with the options of the command line."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    Trainer(args).run()


if __name__ == "__main__":
    main()

"""Cost of chat formats: rendering a long history, tokenizing it, parsing an answer while it streams.

    python benchmarks/formatting.py
    python benchmarks/formatting.py --vocab model.gguf --messages 200 --format qwen3 --format llama3

Rendering is compared with transformers'. Answers are parsed token by token, with four characters per token.

"new" has texts that were not tokenized before; "again" tokenizes the same history a second time; "appended" renders and
tokenizes it with two more messages, like a turn of a chat. The latter is cheap if the vocabulary has the control
tokens.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

import slm_core as slm
from slm_core.chat import encode_segments
from slm_core.chat.prompt import PromptEncoder
from slm_core.protocols import Formatter, Vocab
from slm_core.types import Message, Segment
from slm_formatters.families import chatml, gemma4, gpt_oss, qwen3

ROUNDS = 5
FORMATS = {
    "chatml": chatml.TEMPLATE,
    "qwen3": qwen3.TEMPLATE,
    "gemma4": gemma4.TEMPLATE,
    "gpt_oss": gpt_oss.TEMPLATE,
}
SENTENCE = "{i} times the quick brown fox number {n} jumps over one lazy dog, and then {i} more things happen. "


def history(n_messages: int, seed: int) -> list[Message]:
    """Messages of about a hundred tokens; another seed gives other texts."""
    roles = ("user", "assistant")
    return [Message(roles[i % 2], SENTENCE.format(i=i, n=seed) * 4) for i in range(n_messages)]  # type: ignore[arg-type]


def milliseconds(work: Callable[[int], object], rounds: Iterable[int]) -> float:
    """The best of several rounds; ``work`` gets the number of the round."""
    best = float("inf")
    for i in rounds:
        started = time.perf_counter()
        work(i)
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def by_transformers(template: str, messages: list[Message]) -> str:
    """The same template, rendered by transformers."""
    rendered_messages = [{"role": message.role.value, "content": message.content} for message in messages]
    rendered: str = render_jinja_template([rendered_messages], chat_template=template, bos_token="", eos_token="")[0][0]
    return rendered


def row(name: str, vocab: Vocab, n_messages: int) -> str:
    """One format: milliseconds of rendering, of transformers' rendering, and of tokens."""
    template = FORMATS[name]
    formatter = slm.formatter(template=template)
    rounds = range(ROUNDS)
    first_seed = 1000 * list(FORMATS).index(name)
    histories = [history(n_messages, first_seed + i) for i in rounds]
    prompts = [formatter.render(messages, add_generation_prompt=False) for messages in histories]
    if "strftime_now" not in template:
        assert joined(prompts[0]) == by_transformers(template, histories[0])
    ours = milliseconds(lambda i: formatter.render(histories[i]), rounds)
    theirs = milliseconds(lambda i: by_transformers(template, histories[i]), rounds)
    new = milliseconds(lambda i: encode_segments(vocab, prompts[i]), rounds)
    again = milliseconds(lambda i: encode_segments(vocab, prompts[i]), rounds)
    appended = milliseconds(appending(formatter, vocab, histories), rounds)
    n_tokens = len(encode_segments(vocab, prompts[0]))
    return (
        f"| {name} | {n_tokens:,} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | {new:.1f} | {again:.1f} "
        f"| {ours + new:.1f} | {ours + again:.1f} | {appended:.1f} |"
    )


def appending(formatter: Formatter, vocab: Vocab, histories: list[list[Message]]) -> Callable[[int], object]:
    """The work of a chat after an answer and a question were added to a cached history."""
    encoders = [PromptEncoder(vocab) for _ in histories]
    for encoder, messages in zip(encoders, histories, strict=True):
        encoder.encode(formatter.render(messages))
    longer = [[*messages, *history(2, seed=10_000 + i)[::-1]] for i, messages in enumerate(histories)]
    return lambda i: encoders[i].encode(formatter.render(longer[i]))


TEXT = "The quick brown fox jumps over 13 lazy dogs; <b>then</b> it sleeps, and sleeps.\n"
ANSWERS = {
    "content": ("hermes", "", TEXT, ""),
    "reasoning": ("hermes", "<think>", TEXT, "</think>Yes."),
    "JSON arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": [1',
        ', "' + TEXT.replace("\n", "\\n") + '"',
        "]}}</tool_call>",
    ),
    "tagged arguments": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>\n",
        TEXT,
        "\n</parameter></function></tool_call>",
    ),
    "Python arguments": ("lfm2", "<|tool_call_start|>[f(x=[1", ", " + repr(TEXT), "])]<|tool_call_end|>"),
    "channels": ("harmony", "<|channel|>final<|message|>", TEXT, "<|return|>"),
}
"""Parser, and an answer: its beginning, its repeated part, its end."""


def reading_row(kind: str, n_tokens: int) -> str:
    """Microseconds per token for parsing an answer while it streams."""
    name, begin, middle, end = ANSWERS[kind]
    text = begin + middle * (n_tokens * 4 // len(middle)) + end
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    formatter = slm.formatter(name="chatml", parser=name)

    def read(_: int) -> None:
        parser = formatter.stream_parser()
        for piece in pieces:
            parser.feed(piece)
        assert not parser.finish()[1].malformed_calls

    return f"| {kind} | {name} | {len(pieces):,} | {milliseconds(read, range(ROUNDS)) * 1e3 / len(pieces):.2f} |"


def joined(segments: list[Segment]) -> str:
    """The text of a prompt."""
    return "".join(segment.text for segment in segments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=Path, default=slm.demo_model_path(), help="a GGUF file")
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=4000)
    parser.add_argument("--format", action="append", choices=FORMATS, help="may be repeated; default: all")
    args = parser.parse_args()
    vocab = slm.load_vocab(args.vocab)
    print(
        f"{args.messages} messages, {vocab.size:,} tokens of vocabulary, {platform.processor() or platform.machine()}\n"
    )
    columns = ("render", "transformers", "ratio", "tokens, new", "tokens, again", "all, new", "all, again", "appended")
    print(f"| format | tokens | {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in args.format or FORMATS:
        print(row(name, vocab, args.messages))
    print("\n| answer | parser | tokens | us a token |")
    print("|---|---|---|---|")
    for kind in ANSWERS:
        print(reading_row(kind, args.answer_tokens))


if __name__ == "__main__":
    main()

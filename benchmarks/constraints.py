"""Cost of constraints over a vocabulary: compilation, and each mask; compared with llama.cpp's grammar sampler.

    python benchmarks/constraints.py ggml-vocab-qwen2.gguf
    python benchmarks/constraints.py my-model.gguf --rounds 20 --without-llamacpp

Each spec follows a text that matches it, token by token: a row of logits is masked, then the token is accepted.
``forced`` is the share of tokens that the constraint forces. Percentiles are over the tokens of the text; the time of a
token is its median over the rounds, to exclude other load of the machine. llama.cpp follows the same text with its own
JSON grammar: it checks every token of the vocabulary, in C++, and does not copy the row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from slm_core.constraints import (
    AfterThinking,
    AnyJson,
    Choice,
    Gbnf,
    JsonSchema,
    Regex,
    Spec,
    ToolCalls,
    Triggered,
    compile,  # noqa: A004  (as in re.compile)
)
from slm_core.gguf import GgufFile
from slm_core.tokenization import GgufVocab, build_vocab
from slm_core.types import CallFormat

JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
PERSON = {
    "name": "Ada Lovelace",
    "born": 1815,
    "works": [{"title": "Notes on the Analytical Engine", "year": 1843}, {"title": "Letters", "year": 1850}],
    "known for": "seeing that a machine which works on numbers may work on anything that numbers can stand for",
    "alive": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "integer", "minimum": 0},
        "works": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "year": {"type": "integer"}},
                "required": ["title", "year"],
            },
        },
        "known for": {"type": "string"},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born"],
}
TEXT = json.dumps(PERSON)
PROSE = "Let me think about this: 3 < 4, and so on.\nThen there is more to say, in plain words.\n" * 3
TOOL = {"name": "look_up", "parameters": SCHEMA}
CALL = f'<tool_call>\n{{"name": "look_up", "arguments": {TEXT}}}\n</tool_call>'
CASES: dict[str, tuple[Spec, str]] = {
    "any JSON": (AnyJson(), TEXT),
    "JSON schema": (JsonSchema(SCHEMA), TEXT),
    "GBNF (JSON)": (Gbnf(JSON_GRAMMAR), TEXT),
    "regex": (Regex(r"([A-Z][a-z]+ ?)+, [0-9]{4}-[0-9]{2}-[0-9]{2}"), "Ada Lovelace, 1815-12-10"),
    "choice": (Choice(["the first of them", "the second of them", "none"]), "the second of them"),
    "after thinking": (AfterThinking(JsonSchema(SCHEMA)), f"{PROSE}</think>\n\n{TEXT}"),
    "triggered": (Triggered(JsonSchema(SCHEMA), "```json\n"), f"{PROSE}```json\n{TEXT}"),
    "tool calls": (ToolCalls([TOOL], CallFormat("<tool_call>", "</tool_call>", repeats=True)), f"{PROSE}{CALL}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file; its vocabulary is all that is read")
    parser.add_argument("--rounds", type=int, default=5, help="times that each text is followed")
    parser.add_argument("--without-llamacpp", action="store_true")
    options = parser.parse_args()
    with GgufFile.open(options.model) as gguf:
        vocab = build_vocab(gguf)
    started = time.perf_counter()
    compile(Choice(["a"]), vocab)
    print(f"{options.model.name}: {vocab.size} tokens, on {platform.machine()}, {platform.python_version()}")
    print(f"tables of the vocabulary: {time.perf_counter() - started:.2f} s, once\n")
    print("| spec | compile, ms | mask p50, us | mask p99, us | take p50, us | take p99, us | forced |")
    print("|---|---|---|---|---|---|---|")
    for name, (spec, text) in CASES.items():
        print(row(name, spec, text, vocab, options.rounds))
    if not options.without_llamacpp:
        print(llama_row(options.model, vocab, options.rounds))


def row(name: str, spec: Spec, text: str, vocab: GgufVocab, rounds: int) -> str:
    """One line of the table."""
    logits = np.random.default_rng(0).standard_normal(vocab.size).astype(np.float32)
    started = time.perf_counter()
    prototype = compile(spec, vocab)
    compiling = time.perf_counter() - started
    tokens = vocab.encode(text, add_special=False, parse_special=True)
    masks, takes, forced = [], [], []
    for _ in range(rounds):
        rule = prototype.clone()
        for token in tokens:
            if rule.forced and rule.forced[0] != token:
                break  # the text is tokenized differently from here on
            forced.append(bool(rule.forced))
            masks.append(timed(partial(rule.mask, logits)))
            takes.append(timed(partial(rule.advance, token)))
    return line(name, compiling, masks, takes, rounds, f"{np.mean(forced):.0%}")


def llama_row(path: Path, vocab: GgufVocab, rounds: int) -> str:
    """llama.cpp's grammar sampler on the JSON text."""
    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    cells = (lib.llama_token_data * vocab.size)()
    table = np.ctypeslib.as_array(ctypes.cast(cells, ctypes.POINTER(ctypes.c_float)), (vocab.size, 3))
    masks, takes = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        sampler = lib.llama_sampler_init_grammar(lib.llama_model_get_vocab(model), JSON_GRAMMAR.encode(), b"root")
        compiling = time.perf_counter() - started
        for token in vocab.encode(TEXT, add_special=False, parse_special=False):
            table[:, 0].view(np.int32)[:] = np.arange(vocab.size)
            table[:, 1] = 0.0
            array = lib.llama_token_data_array(cells, vocab.size, -1, False)
            masks.append(timed(partial(lib.llama_sampler_apply, sampler, ctypes.byref(array))))
            takes.append(timed(partial(lib.llama_sampler_accept, sampler, token)))
        lib.llama_sampler_free(sampler)
    lib.llama_model_free(model)
    return line("llama.cpp, GBNF (JSON)", compiling, masks, takes, rounds, "")


def line(name: str, compiling: float, masks: list[float], takes: list[float], rounds: int, forced: str) -> str:
    """Percentiles over the tokens of the text, of each token's median over the rounds."""
    per_token = [np.median(np.reshape(times, (rounds, -1)), axis=0) for times in (masks, takes)]
    numbers = " | ".join(f"{np.percentile(times, p):.0f}" for times in per_token for p in (50, 99))
    return f"| {name} | {compiling * 1e3:.1f} | {numbers} | {forced} |"


def timed(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


if __name__ == "__main__":
    main()

"""A forked process computes with one thread if its parent has used llama.cpp's; with more it would wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

WAIT_S = 60
PROGRAM = """
import logging, os, signal, sys
logging.basicConfig(stream=sys.stdout, format="%(message).40s")
import slm_core as slm

def load():
    return slm.load(slm.demo_model_path(), backend="llamacpp", n_threads=2)

def answer(chat, text):
    print("answer:", chat.send(text, max_tokens=2, temperature=0).text, flush=True)

model = load()
chat = model.chat()
{before}
if os.fork() == 0:
    signal.alarm({wait_s})
    answer(chat, "Hello")
    answer(model.chat(), "Hello")
    answer(load().chat(), "Hello")
    os._exit(0)
os.wait()
answer(chat, "Hello")
"""
WARNING = "llama.cpp computes with one thread here:"


@pytest.mark.parametrize(("before", "expected"), [("answer(chat, 'Hi')", [WARNING]), ("", [])])
def test_a_forked_process_answers(before: str, expected: list[str]) -> None:
    """With a chat of the parent, a new chat of the parent's model, and a model of the child."""
    program = PROGRAM.format(before=before, wait_s=WAIT_S)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line == WARNING] == expected
    *_, of_the_same_chat, of_a_new_chat, of_a_new_model, in_the_parent = [x for x in lines if x.startswith("answer: ")]
    assert of_the_same_chat == in_the_parent
    assert of_a_new_chat == of_a_new_model

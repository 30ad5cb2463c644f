"""lm-eval's local-completions: a tiny task of choices and one of answers, with the server's tokenizer."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "num_fewshot": 0,
}
QUESTIONS = [
    {"question": '{"name": "Ada", "age":', "choices": [" 36}", " banana the of", "?? why"], "answer": 0},
    {"question": '{"city":', "choices": ["}}}}", ' "Rome"}', " and or not"], "answer": 1},
]

with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    choices = {
        **COMMON,
        **files,
        "task": "tiny_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
    }
    answers = {
        **COMMON,
        **files,
        "task": "tiny_answers",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["}"], "max_gen_toks": 8},
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "demo",
            "base_url": os.environ["SERVER_URL"] + "/v1/completions",
            "tokenizer_backend": "remote",
            "batch_size": 2,
            "max_length": 512,
        },
        tasks=[choices, answers],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
assert results["results"]["tiny_choices"]["acc,none"] == 1.0, results["results"]
assert all("}" not in sample["resps"][0][0] for sample in results["samples"]["tiny_answers"])

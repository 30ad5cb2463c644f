"""``slm eval``: evaluates a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from slm_core.atomic_write import check_new_file, write_whole
from slm_core.cli import options as o
from slm_core.cli.adapters import AdapterOptions
from slm_core.cli.terminal import out, print_json, write
from slm_core.errors import InvalidOption
from slm_core.foreign import reported
from slm_core.user_paths import expanded


@o.expand_groups
def evaluate(
    *,
    model: o.ModelPath = None,
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NAME,NAME", help="Tasks of lm-evaluation-harness, such as arc_easy.")
    ],
    engine: o.EngineOptions,
    adapter_options: AdapterOptions,
    chat_format: o.ChatFormatOptions,
    ctx: o.ContextSize = None,
    kv_type: o.KvTypeFlag = None,
    limit: Annotated[float | None, typer.Option(min=0, help="Documents of each task; below 1, a share.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder with tasks of your own (YAML).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat format.")] = False,
    system: o.System = None,
    parallel: Annotated[int, typer.Option(min=1, help="Answers that are generated together.")] = 8,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all results, with each document's, as JSON.")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    r"""Evaluate a model on tasks of lm-evaluation-harness (pip install "slm-core\[eval]").

    Tasks download their documents from the Hugging Face Hub, unless --include-path has tasks with files of their own.
    """
    _show_bars_only_in_terminals()
    from slm_core.evaluation import HarnessModel  # raises MissingExtra

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise InvalidOption("--tasks names no task")
    if output is not None:
        check_new_file(expanded(output), (), force=True)  # before hours of work, not after them
    kv_types = o.read_kv_types(kv_type)
    with engine.load(model, chat_format) as loaded:
        n_ctx, adapters = o.context_size(loaded, ctx), adapter_options.load(loaded)
        subject = HarnessModel(loaded, n_ctx=n_ctx, n_parallel=parallel, adapters=adapters, **kv_types)
        results = _results(
            subject,
            names,
            include_path,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
            system_instruction=system,
            log_samples=output is not None,
        )
    if as_json:
        print_json({"results": results["results"], "n-samples": results["n-samples"]})
    else:
        from lm_eval.utils import make_table

        write(out(), make_table(results) + "\n")
    if output is not None:  # last, because it may fail: the disk is full, or read-only
        write_whole(output, json.dumps(results, default=str, ensure_ascii=False, indent=1).encode())


def _show_bars_only_in_terminals() -> None:
    """Disable the progress bars of libraries in pipes: a log would have a line for each update."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads it when it is imported


def _results(subject: object, names: list[str], include_path: Path | None, **options: object) -> dict[str, Any]:
    """The harness's results.

    Raises:
        InvalidOption: an unknown task, or one whose documents cannot be loaded.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    with reported(InvalidOption, "lm-evaluation-harness"):
        own = None if include_path is None else str(expanded(include_path))
        manager = TaskManager(include_path=own, include_defaults=own is None)
        if own is not None and _unknown(manager, names):
            manager = TaskManager(include_path=own)  # reads the files of all its tasks, which takes seconds
        if unknown := _unknown(manager, names):
            raise InvalidOption(f"unknown tasks: {', '.join(unknown)} (lm_eval ls tasks lists all)")
        results: dict[str, Any] = simple_evaluate(
            model=subject, tasks=names, task_manager=manager, bootstrap_iters=0, **options
        )
    return results


def _unknown(manager: Any, names: list[str]) -> list[str]:
    known = set(manager.all_tasks)
    return [name for name in names if name not in known]

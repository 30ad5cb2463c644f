"""``slm run``: answers one prompt."""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from slm_core.chat import ChatStream
from slm_core.cli import completions
from slm_core.cli import options as o
from slm_core.cli.adapters import AdapterOptions
from slm_core.cli.completions import Request
from slm_core.cli.constraints import ConstraintOptions, check_tools
from slm_core.cli.drafts import DraftOptions, Drafts
from slm_core.cli.files import read_stdin
from slm_core.cli.streaming import PlainView, stream_answer, summary
from slm_core.cli.terminal import INTERRUPTED, PrefillBar, note, out, print_json
from slm_core.cli.tools_file import read_tools
from slm_core.errors import ContextFull, InvalidOption
from slm_core.generation import Answer, BeamAnswer, Completion, FinishReason, Generation
from slm_core.hub import is_reference
from slm_core.model import Model
from slm_core.user_paths import exists

STDIN_NOTE_S = 3.0
"""Seconds of waiting for standard input, if there is also a prompt, before a note says so."""


@o.expand_groups
def run(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help=f"{o.A_MODEL}; the demo model if none is named.", autocompletion=o.model_files
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; without MODEL, it contains a space.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt. It follows what standard input contains."),
    ] = None,
    system: o.System = None,
    thinking: o.Thinking = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat format.")] = False,
    suffix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The text after a gap: the model writes what comes between PROMPT and it."),
    ] = None,
    constraint: ConstraintOptions,
    tools: o.ToolsFile = None,
    engine: o.EngineOptions,
    adapter_options: AdapterOptions,
    chat_format: o.ChatFormatOptions,
    drafts: DraftOptions,
    ctx: o.ContextSize = None,
    kv_type: o.KvTypeFlag = None,
    sampling: o.SamplingOptions,
    n: o.Completions = 1,
    best_of: o.BestOf = None,
    beams: o.BeamWidth = None,
    stats: o.Stats = False,
    as_json: o.AsJson = False,
) -> None:
    """Send a prompt to a model, and stream its answer. Ctrl-C ends the answer.

    With standard input and a prompt, the model reads both: the input, an empty line, the prompt.
    """
    path, prompt = _model_and_prompt(model, text, prompt)
    if raw or suffix is not None:
        as_it_is = system is None and thinking is None and tools is None and not chat_format.is_set
        _check_as_it_is("--raw" if raw else "--suffix", as_it_is=as_it_is)
    several = n > 1 or best_of is not None or beams is not None
    _check_one_answer(drafts.flag or (None if tools is None else "--tools"), several=several)
    rule, whole = constraint.spec(), _prompt(prompt)
    check_tools(rule, has_tools=tools is not None)
    offered = [] if tools is None else read_tools(tools)
    request_sampling, kv_types = sampling.sampling(), o.read_kv_types(kv_type)
    with engine.load(path, chat_format) as loaded, drafts.load(engine) as drafting:
        request = Request(
            whole,
            o.context_size(loaded, ctx),
            request_sampling,
            raw=raw or suffix is not None,
            system=system,
            thinking=thinking,
            suffix=suffix,
            constraint=rule,
            tools=offered,
            adapters=adapter_options.load(loaded),
            kv_types=kv_types,
        )
        try:
            if several:
                cancelled = _answer_several(loaded, request, n, best_of, beams, stats=stats, as_json=as_json)
            else:
                cancelled = _answer_one(loaded, request, drafting, stats=stats, as_json=as_json)
        except ContextFull as error:
            raise InvalidOption(o.full_context(error, "--ctx N sets a larger one")) from error
    if cancelled:
        raise typer.Exit(INTERRUPTED)


def _check_as_it_is(flag: str, *, as_it_is: bool) -> None:
    if not as_it_is:
        raise InvalidOption(
            f"{flag} continues a plain text: --system, --thinking, --format, --template and --tools do not go with it"
        )


def _check_one_answer(flag: str | None, *, several: bool) -> None:
    if several and flag is not None:
        raise InvalidOption(f"{flag} goes with one answer, not with -n, --best-of and --beams")


def _answer_one(loaded: Model, request: Request, drafts: Drafts, *, stats: bool, as_json: bool) -> bool:
    """Stream one answer; returns whether it was cancelled."""
    stream: ChatStream | Generation
    rule = request.constraint_for(loaded)
    speculation = drafts.speculation(loaded, request.n_ctx, request.sampling)
    with PrefillBar() as bar:
        if request.raw:
            session = loaded.session(
                n_ctx=request.n_ctx,
                n_seq_max=1,
                sampling=request.sampling,
                adapters=request.adapters,
                **request.kv_types,
            )
            session.append(request.prompt)
            stream = session.generate(constraint=rule, speculation=speculation, progress=bar)
        else:
            chat = loaded.chat(
                system=request.system,
                n_ctx=request.n_ctx,
                sampling=request.sampling,
                tools=request.tools,
                thinking=request.thinking,
                adapters=request.adapters,
                **request.kv_types,
            )
            stream = chat.stream(request.text, constraint=rule, speculation=speculation, progress=bar)
        answer = stream_answer(stream, None if as_json else PlainView(out(), results_are_notes=True))
    if as_json:
        print_json(_as_json(answer, loaded))
    if stats:
        note(summary(answer))
    return answer.finish_reason is FinishReason.CANCELLED


def _answer_several(
    loaded: Model, request: Request, n: int, best_of: int | None, beams: int | None, *, stats: bool, as_json: bool
) -> bool:
    """Show several answers when all are complete; returns whether they were cancelled."""
    if beams is not None and best_of is not None:
        raise InvalidOption("--beams and --best-of do not go together: --beams shows the best -n beams")
    answers: BeamAnswer | tuple[Completion, ...]
    if beams is None:
        answers = completions.sample_completions(loaded, request, n, best_of)
    else:
        answers = completions.beam_search(loaded, request, beams, n)
    if as_json:
        print_json(completions.as_json(loaded, request, answers))
    else:
        completions.show_all(loaded, request, answers, out())
    if stats and isinstance(answers, BeamAnswer):
        usage, timings = answers.usage, answers.timings
        note(f"{usage.prompt_tokens} prompt tokens in {timings.prefill_s:.2f} s, {timings.decode_s:.2f} s of search")
    elif stats and not isinstance(answers, BeamAnswer):
        for completion in answers:
            note(f"{completion.index + 1}: {summary(completion.answer)}")
    return completions.was_cancelled(answers)


def _model_and_prompt(model: str | None, text: str | None, prompt: str | None) -> tuple[Path | None, str | None]:
    """The model and the prompt of the command line.

    Args:
        model: the first argument. If it is the only one, and there is no ``--prompt``, it may be the prompt: it is a
            model if it exists, ends in .gguf or is a reference to the Hub; otherwise it is a prompt if it contains a
            space.
        text: the second argument.
        prompt: the value of ``--prompt``.

    Raises:
        InvalidOption: the prompt is given twice, or a single argument is neither a model nor a prompt.
    """
    if text is not None and prompt is not None:
        raise InvalidOption(f"the prompt is given twice: {text[:100]!r} and --prompt")
    if model is None or text is not None or prompt is not None or _is_model(model):
        return (None if model is None else Path(model)), (prompt if text is None else text)
    if any(character.isspace() for character in model):
        return None, model
    raise InvalidOption(
        f"{model!r} is neither a model (a file, a directory, hf://user/repo) nor a prompt with a space"
        f" (a prompt of one word: -p {model})"
    )


def _is_model(word: str) -> bool:
    return is_reference(word) or word.lower().endswith(".gguf") or exists(word)


def _prompt(text: str | None) -> str:
    """The content of standard input, followed by the prompt.

    Raises:
        InvalidOption: both are empty.
    """
    given = "" if sys.stdin.isatty() else _standard_input(beside_prompt=text is not None)
    parts = [given.rstrip("\n"), text] if text and given.strip() else [text or given]
    if not "".join(parts):
        raise InvalidOption("there is no prompt: give one as an argument, or on standard input")
    return "\n\n".join(parts)


def _standard_input(*, beside_prompt: bool) -> str:
    """All of standard input. A note says that the command waits for it: users may not know that it is open."""
    waiting = threading.Timer(STDIN_NOTE_S, note, ["(reading standard input to its end; < /dev/null leaves it out)"])
    waiting.daemon = True
    if beside_prompt:
        waiting.start()
    try:
        return read_stdin()
    finally:
        waiting.cancel()


def _as_json(answer: Answer, loaded: Model) -> dict[str, object]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [dataclasses.asdict(call) for call in answer.tool_calls],
        "malformed_calls": [dataclasses.asdict(call) for call in answer.malformed_calls],
        "tool_results": [
            {**dataclasses.asdict(result.call), "content": result.content, "failed": result.error is not None}
            for result in answer.results
        ],
        "finish_reason": answer.finish_reason,
        "speculation": None if answer.speculation is None else dataclasses.asdict(answer.speculation),
        **completions.usage_json(answer),
        "model": loaded.info.path,
        "backend": loaded.info.backend,
    }

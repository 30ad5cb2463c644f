"""The commands of ``slm``, including plugins' commands, and the conversion of errors to messages and exit codes."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from slm_core.cli import (
    bench,
    cache,
    chat,
    convert,
    demo,
    embed,
    evaluate,
    inspect,
    lora,
    models,
    new_backend,
    quantize,
    rerank,
    run,
    score,
    serve,
    template,
)
from slm_core.cli.terminal import INTERRUPTED, complain
from slm_core.errors import PluginError, SlmError
from slm_core.plugins import registry

EXIT_CODES = "Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted."
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer has no public name for it
_DEBUG_HELP = "Show the traceback of an error."


class Group(TyperGroup):
    """Adds the commands of plugins; turns errors into one line and an exit code."""

    _has_plugin_commands = False

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands.

        Raises:
            PluginError: a plugin's command has the name of another command.
        """
        self._add_plugin_commands()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, or None; plugins are looked up only if no built-in command has the name."""
        if cmd_name not in self.commands:
            self._add_plugin_commands()
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _accept_debug(command)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options of ``slm`` itself; ``--help`` lists the commands here, before ``invoke``."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (SlmError, OSError) as error:
            complain(str(error))
            raise typer.Exit(1) from None

    def invoke(self, ctx: Any) -> Any:
        """Run a command; with ``--debug``, errors keep their traceback."""
        try:
            return super().invoke(ctx)
        except typer.Abort as abort:  # a question was not answered: Ctrl-C, or the end of the input
            if isinstance(abort.__context__, KeyboardInterrupt):
                raise typer.Exit(INTERRUPTED) from None
            raise
        except (typer.Exit, UsageError, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # users get one line per error
            if ctx.params.get("debug"):
                raise
            expected = isinstance(error, (SlmError, OSError))
            complain(str(error) if expected else f"{type(error).__name__}: {error} (--debug shows where)")
            raise typer.Exit(1) from None

    def _add_plugin_commands(self) -> None:
        if self._has_plugin_commands:
            return
        provided = registry().commands
        if duplicates := sorted(self.commands.keys() & provided):
            raise PluginError(f"a plugin provides the command {duplicates[0]!r}, which slm has already")
        for name in provided:
            self.add_command(typer.main.get_command(_plugin_app(name)), name)
        self._has_plugin_commands = True


def _accept_debug(command: Any) -> None:
    """Add ``--debug`` to a command and to the commands of a group, so that it may stand behind their names, too."""
    if not any("--debug" in parameter.opts for parameter in command.params):
        command.params.append(_debug_option())
    if isinstance(command, TyperGroup):
        for member in command.commands.values():
            _accept_debug(member)


def _set_debug(context: typer.Context, value: bool) -> None:
    if value:
        context.find_root().params["debug"] = True


def _debug_option() -> Any:
    """The option ``--debug`` of a command: it sets the option of ``slm``. typer builds options only with a command."""
    carrier = typer.Typer(add_completion=False)

    @carrier.command()
    def carry(
        debug: Annotated[
            bool, typer.Option("--debug", help=_DEBUG_HELP, callback=_set_debug, expose_value=False, show_default=False)
        ] = False,
    ) -> None: ...

    return typer.main.get_command(carrier).params[0]


def _plugin_app(name: str) -> typer.Typer:
    """The command of a plugin. For a broken target it is a command that fails with the reason; other commands work."""
    try:
        plugin_app = registry().command(name)
        if not isinstance(plugin_app, typer.Typer):
            raise PluginError(f"the target of the command {name!r} is not a typer.Typer")
    except PluginError as error:
        return _failing_app(name, error)
    return plugin_app


def _failing_app(name: str, error: PluginError) -> typer.Typer:
    failing = typer.Typer(add_completion=False)
    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}

    @failing.command(name, help=f"Not available: {error}", context_settings=any_arguments)
    def fail() -> None:
        raise error

    return failing


app = typer.Typer(
    cls=Group,
    name="slm",
    help="Run small language models on whichever engine suits.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"slm {importlib.metadata.version('slm-core')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=_DEBUG_HELP)] = False,
) -> None:
    """Run small language models on whichever engine suits."""


_TALK, _LOOK, _MEASURE = "Talk to a model", "Look at models and backends", "Measure and prove"
_MAKE = "Make model files"
_HUB = "Models of the Hugging Face Hub"

app.command(epilog="Example: slm demo", rich_help_panel=_TALK)(demo.demo)
app.command(epilog='Example: slm run model.gguf "What is 12 + 30?"', rich_help_panel=_TALK)(run.run)
app.command(epilog="Example: slm chat model.gguf --backend native", rich_help_panel=_TALK)(chat.chat)
app.command(epilog='Example: slm embed model.gguf "some text" "another"', rich_help_panel=_TALK)(embed.embed)
app.command(epilog='Example: slm rerank reranker.gguf "a question" "one text" "another"', rich_help_panel=_TALK)(
    rerank.rerank
)
app.command(epilog="Example: slm serve model.gguf", rich_help_panel=_TALK)(serve.serve)
app.command(epilog="Example: slm info model.gguf", rich_help_panel=_LOOK)(inspect.info)
app.command(epilog="Example: slm backends", rich_help_panel=_LOOK)(inspect.backends)
app.command(epilog='Example: slm tokenize model.gguf "some text"', rich_help_panel=_LOOK)(inspect.tokenize)
app.command(epilog="Example: slm template model.gguf --messages chat.json", rich_help_panel=_LOOK)(template.template)
app.command(epilog="Example: slm quantize model-F16.gguf model-Q4_K_M.gguf --type Q4_K_M", rich_help_panel=_MAKE)(
    quantize.quantize
)
app.add_typer(
    lora.app, name="lora", help="Adapters (LoRA): look at them, convert them, merge them.", rich_help_panel=_MAKE
)
app.command("list", epilog="Example: slm list", rich_help_panel=_HUB)(models.list_models)
app.command(epilog="Example: slm pull hf://user/repo:Q4_K_M", rich_help_panel=_HUB)(models.pull)
app.command(epilog="Example: slm rm hf://user/repo:Q4_K_M", rich_help_panel=_HUB)(models.rm)
app.command(epilog="Example: slm cache --clear", rich_help_panel=_LOOK)(cache.cache)
app.command(epilog="Example: slm convert model.gguf model-onnx --to onnx", rich_help_panel=_MAKE)(convert.convert)
app.command(epilog="Example: slm bench model.gguf --json", rich_help_panel=_MEASURE)(bench.bench)
app.command(epilog="Example: slm score model.gguf text.txt", rich_help_panel=_MEASURE)(score.score)
app.command("eval", epilog="Example: slm eval model.gguf --tasks arc_easy --limit 100", rich_help_panel=_MEASURE)(
    evaluate.evaluate
)
app.command("new-backend", epilog="Example: slm new-backend tiny", rich_help_panel=_MAKE)(new_backend.new_backend)

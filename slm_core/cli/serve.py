"""``slm serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slm_core.checkpoints import open_model
from slm_core.cli import options as o
from slm_core.cli.adapters import read_lora
from slm_core.cli.drafts import Lookup
from slm_core.cli.terminal import note
from slm_core.cpu import usable_cores
from slm_core.errors import InvalidOption, MissingExtra
from slm_core.isolation import Isolation
from slm_core.loading import demo_model_path
from slm_core.model import Model
from slm_core.modelinfo import model_info
from slm_core.paths import local
from slm_core.plugins import registry
from slm_core.types import KvType
from slm_core.user_paths import exists

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from slm_core.server import EngineSettings, ServedAdapter, ServedModel, ServerOptions
    from slm_core.server.cluster.deployment import ClusterOptions

_ACCESS, _ENGINE, _RAY = "Access", "Engine", "Many machines"


@o.expand_groups
def serve(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=][BACKEND:]MODEL", help=f"{o.A_MODEL}; may be repeated. Without one, the demo model."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.", rich_help_panel=_ACCESS)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.", rich_help_panel=_ACCESS)] = 8080,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that clients must send; may be repeated. By default $SLM_API_KEY, which is one key.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys with names and limits (docs/serving.md).", rich_help_panel=_ACCESS),
    ] = None,
    max_requests: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests at a time, each answer counts as one; more are refused with 429.",
            rich_help_panel=_ACCESS,
        ),
    ] = 256,
    max_priority: Annotated[
        float, typer.Option(help="The highest priority that a request may ask for.", rich_help_panel=_ACCESS)
    ] = 0.0,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="The longest request, such as 16M.", rich_help_panel=_ACCESS)
    ] = "16M",
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Serve other machines without a key.", rich_help_panel=_ACCESS)
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Web pages of this origin may call; may be repeated.", rich_help_panel=_ACCESS
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name of this server; may be repeated.", rich_help_panel=_ACCESS),
    ] = None,
    sessions_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where sessions are kept; by default in memory only.")
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="ALIAS=NAME", help="Another name of a model; may be repeated."),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL/]NAME=PATH[:SCALE]",
            help="An adapter (LoRA) of a model, by default of the first one; requests ask for NAME. May be repeated.",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of all loaded models, such as 6G: others make room."),
    ] = None,
    keep_alive: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds without requests after which a model is unloaded.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run models in the server's process: a crash ends the server.")
    ] = False,
    hang: Annotated[float, typer.Option(min=1, help="Seconds of a step after which a model is restarted.")] = 120.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running answers after SIGTERM.")] = 30.0,
    engine: o.EngineOptions,
    format: o.Format = None,  # noqa: A002  # the name of the option
    ctx: Annotated[
        int, typer.Option("--ctx", min=1, help="Tokens of all requests together.", rich_help_panel=_ENGINE)
    ] = 32768,
    kv_type: Annotated[
        str | None,
        typer.Option(
            "--kv-type",
            metavar="TYPE[,TYPE]",
            help="How the KV cache stores keys and values (see slm run --help).",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option(min=1, help="Requests that are computed together.", rich_help_panel=_ENGINE)
    ] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Maximum tokens in a step.", rich_help_panel=_ENGINE)] = 512,
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds of a step while answers are generated.", rich_help_panel=_ENGINE)
    ] = 100.0,
    reuse: Annotated[
        str, typer.Option(metavar="prefix|cut", help="Which cached tokens are reused.", rich_help_panel=_ENGINE)
    ] = "prefix",
    cache_dir: Annotated[
        Path | None, typer.Option(help="A directory for answered histories.", rich_help_panel=_ENGINE)
    ] = None,
    lookup: Lookup = None,
    use_ray: Annotated[
        bool, typer.Option("--ray", help="Serve from several replicas, on one or many machines.", rich_help_panel=_RAY)
    ] = False,
    replicas: Annotated[
        str | None,
        typer.Option(metavar="N|MIN:MAX", help="How many replicas: 2 by default.", rich_help_panel=_RAY),
    ] = None,
    replica_cpus: Annotated[
        int | None, typer.Option(min=1, help="Cores of a replica: all, divided, by default.", rich_help_panel=_RAY)
    ] = None,
    replica_gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs of a replica: 0 by default.", rich_help_panel=_RAY)
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A Ray cluster; by default $RAY_ADDRESS, or one on this machine for the time of the command.",
            rich_help_panel=_RAY,
        ),
    ] = None,
) -> None:
    """Serve models over HTTP: a page to chat, and OpenAI's, Anthropic's and Ollama's APIs.

    Ctrl-C or SIGTERM stops it after the running answers.
    """
    try:
        from slm_core.server import EngineSettings, ServerOptions, create_app
        from slm_core.server.keys import read_keys
        from slm_core.server.run import run
    except ImportError as error:
        raise MissingExtra(f'slm serve needs pip install "slm-core[serve]" ({error})') from error
    if reuse not in ("prefix", "cut"):
        raise InvalidOption(f"--reuse {reuse!r} (accepted: prefix, cut)")
    options = ServerOptions(
        host=host,
        keys=(*_keys(key or []), *([] if key_file is None else read_keys(key_file))),
        max_requests=max_requests,
        max_priority=max_priority,
        max_body_bytes=_bytes(max_body, "--max-body"),
        no_auth=no_auth,
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allow_origin or ()),
        grace_s=grace,
        hang_s=hang,
        memory_bytes=None if memory_budget is None else _bytes(memory_budget, "--memory-budget"),
        keep_alive_s=keep_alive,
        sessions_dir=sessions_dir,
    )
    settings = EngineSettings(
        n_ctx=ctx,
        n_parallel=parallel,
        n_batch=batch,
        step_ms=step_ms,
        reuse="cut" if reuse == "cut" else "prefix",
        cache_dir=cache_dir,
        lookup=lookup,
        **o.read_kv_types(kv_type),
    )
    isolation = None if in_process else Isolation(call_timeout_s=hang)

    def load(path: Path | None, backend: str | None) -> Model:
        chosen = engine if backend is None else replace(engine, backend=backend)
        return chosen.load(path, o.ChatFormatOptions(format=format), isolation)

    if use_ray:
        cluster = _cluster(replicas, replica_cpus, replica_gpus, ray_address, settings)
        engine = engine if engine.threads is not None else replace(engine, threads=cluster.n_cpus)
        _refuse_folders(sessions_dir, cache_dir)
    elif any(option is not None for option in (replicas, replica_cpus, replica_gpus, ray_address)):
        raise InvalidOption("--replicas, --replica-cpus, --replica-gpus and --ray-address are for --ray")
    served = _served(models or [], alias or [], lora or [], load, settings, has_budget=memory_budget is not None)
    app = _front(served, options, cluster) if use_ray else create_app(served, options, log=sys.stderr)
    run(app, options, port, lambda url: _announce(url, options))


def _keys(given: list[str]) -> list[str]:
    """The keys of ``--key``, or else the key of the environment.

    The option has no ``envvar``: typer would split its value at spaces, and make each word a key.

    Raises:
        InvalidOption: the key of the environment is empty.
    """
    key = os.environ.get("SLM_API_KEY")
    if given or key is None:
        return given
    if not key:
        raise InvalidOption("SLM_API_KEY is empty (accepted: a key; without keys, the variable must not be set)")
    return [key]


def _cluster(
    replicas: str | None, n_cpus: int | None, n_gpus: float | None, address: str | None, settings: EngineSettings
) -> ClusterOptions:
    """The options of ``--ray``.

    Raises:
        InvalidOption: ``--replicas`` is not a number, or two numbers in ascending order.
        MissingExtra: Ray is not installed.
    """
    try:
        from slm_core.server.cluster.deployment import ClusterOptions
    except ImportError as error:
        raise MissingExtra(f'slm serve --ray needs pip install "slm-core[ray]" ({error})') from error
    found = re.fullmatch(r"(\d+)(?::(\d+))?", replicas or "2")
    n_min, n_max = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= n_min <= n_max:
        raise InvalidOption(f"--replicas {replicas!r} (accepted: a number, such as 4, or two, such as 2:8)")
    return ClusterOptions(
        address=address or os.environ.get("RAY_ADDRESS") or None,
        n_min=n_min,
        n_max=n_max,
        n_parallel=settings.n_parallel,
        n_chars=4 * settings.n_ctx,
        n_cpus=n_cpus or max(1, usable_cores() // n_max),
        n_gpus=n_gpus or 0,
    )


def _refuse_folders(sessions_dir: Path | None, cache_dir: Path | None) -> None:
    """Refuse folders: each replica would need its own folder, which outlives the replica."""
    for option, folder in (("--sessions-dir", sessions_dir), ("--cache-dir", cache_dir)):
        if folder is not None:
            raise InvalidOption(f"{option} does not go with --ray: replicas come and go, and share no folder")


def _front(served: list[ServedModel], options: ServerOptions, cluster: ClusterOptions) -> Starlette:
    from slm_core.server.cluster.deployment import RayReplicas
    from slm_core.server.cluster.front import create_front

    note(f"Starting {cluster.n_min} replica{'s' if cluster.n_min > 1 else ''} ...")
    return create_front(RayReplicas(served, options, cluster), options, log=sys.stderr)


def _served(
    models: list[str],
    aliases: list[str],
    lora: list[str],
    load: Callable[[Path | None, str | None], Model],
    settings: EngineSettings,
    *,
    has_budget: bool,
) -> list[ServedModel]:
    from slm_core.server import ServedModel

    served = {}
    for text in models or ["demo="]:
        name, backend, path = _named(text)
        if name in served:
            raise InvalidOption(f"two models have the name {name!r}: name one as NAME=MODEL")
        n_bytes = _needed(path, settings) if has_budget else 0
        served[name] = ServedModel(name, partial(load, path, backend), settings=settings, n_bytes=n_bytes)
    for text in aliases:
        alias, equals, name = text.partition("=")
        if not equals or not alias or name not in served:
            raise InvalidOption(f"--alias {text!r} (accepted: ALIAS=NAME; names: {', '.join(served)})")
        served[name] = replace(served[name], aliases=(*served[name].aliases, alias))
    for text in lora:
        parent, adapter = _adapter(text)
        parent = parent or next(iter(served))
        if parent not in served:
            raise InvalidOption(f"--lora {text!r}: there is no model {parent!r} (there are: {', '.join(served)})")
        n_bytes = served[parent].n_bytes + (_bytes_of(adapter.path) if has_budget else 0)
        served[parent] = replace(served[parent], adapters=(*served[parent].adapters, adapter), n_bytes=n_bytes)
    return list(served.values())


def _adapter(text: str) -> tuple[str, ServedAdapter]:
    """The model's name, or "", and the adapter of ``[MODEL/]NAME=PATH[:SCALE]``.

    Raises:
        InvalidOption: it has another form.
    """
    from slm_core.server import ServedAdapter

    names, equals, rest = text.partition("=")
    parent, _, name = names.rpartition("/")
    path, scale = read_lora(rest)
    if not equals or not name or not rest or "/" in parent:
        raise InvalidOption(f"--lora {text!r} (accepted: NAME=PATH, NAME=PATH:SCALE, MODEL/NAME=PATH)")
    return parent, ServedAdapter(name, path.absolute(), scale)


def _named(text: str) -> tuple[str, str | None, Path | None]:
    """The name, backend and path of ``[NAME=][BACKEND:]MODEL``; without a path, the demo model."""
    name, equals, rest = text.partition("=")
    if not equals or "/" in name:
        name, rest = "", text
    engine, colon, path = rest.partition(":")
    backend = engine if colon and engine in registry().backends else None
    if backend is None:
        path = rest
    name = name or path.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or backend or "demo"
    if not path:
        return name, backend, None
    # Absolute: replicas run elsewhere. Other paths are names of downloads, or wrong, and are shown as they were given.
    return name, backend, Path(path).absolute() if exists(path) else Path(path)


def _needed(path: Path | None, settings: EngineSettings) -> int:
    """The memory of a model's weights and of its engine's KV cache, in bytes, from its header."""
    with open_model(demo_model_path() if path is None else local(path)) as file:
        kv_types = (kind or KvType.F16 for kind in (settings.kv_type_k, settings.kv_type_v))
        infos = [model_info(file, backend="", device="", kv_type=kv_type) for kv_type in kv_types]
    per_token = sum(info.state_bytes_per_token or 0 for info in infos) // 2  # one half are keys, the other values
    per_sequence = infos[0].state_bytes_per_sequence or 0
    return infos[0].n_bytes + settings.n_ctx * per_token + 2 * settings.n_parallel * per_sequence


def _bytes_of(path: Path) -> int:
    """The bytes of an adapter: of a file, or of the weights in a directory. A missing one is reported when it loads."""
    files = path.glob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
    return sum(file.stat().st_size for file in files)


def _bytes(text: str, option: str) -> int:
    """The number of bytes of a size such as 6G or 500M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    n_bytes = 0.0 if found is None else float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")
    if not 1 <= n_bytes < math.inf:
        raise InvalidOption(f"{option} {text!r:.80} (accepted: a size, such as 6G or 500M)")
    return int(n_bytes)


def _announce(url: str, options: ServerOptions) -> None:
    key = ' -H "Authorization: Bearer $SLM_API_KEY"' if options.keys else ""
    body = json.dumps({"messages": [{"role": "user", "content": "What is 12 + 30?"}]})
    note(
        f"Serving on {url} (Ctrl-C stops): that is a page to chat. OpenAI's API is at {url}/v1;"
        f" its description is at {url}/openapi.json."
    )
    note(f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")

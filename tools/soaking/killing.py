"""A workload that kills a process with ``kill -9`` at random moments while it answers, and checks its last dump."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slm_core.diskcache import CACHE_VARIABLE
from slm_core.sampling import Sampling
from soaking.checks import Wrong, require, same_greedy
from soaking.site import MODELS, N_BATCH, N_CTX, Site
from soaking.worker import MARK

WORKER = "soaking.worker"
WORKER_CACHE = "worker-cache"
"""The disk cache of killed workers, in the folder of the site."""
PATIENCE_S = 400.0
"""A worker that takes longer counts as hanging; SIGABRT ends it and prints its stack."""


@dataclass(slots=True)
class Life:
    """The output of a worker until its end.

    Attributes:
        begins: tokens of the answer at its start; None if it was killed before.
        saved: tokens in the last dump that it acknowledged; 0 for none.
        said: the whole answer, if it was completed.
    """

    begins: int | None = None
    saved: int = 0
    said: tuple[int, ...] | None = None


def killed(site: Site, rng: random.Random, worker: str = WORKER) -> None:
    """A worker is killed up to three times. Each restart has all acknowledged tokens, and the answer stays the same.

    Args:
        site: the site.
        rng: draws model, prompt and moments.
        worker: the module of the worker.
    """
    name = rng.choice(MODELS)
    prompt, n = site.prompt(name, rng), rng.randint(10, 60)
    folder = site.folder / f"worker-{rng.getrandbits(48):x}"
    folder.mkdir()
    if rng.random() < 0.3:
        _forget_cache(site.folder / WORKER_CACHE)  # so that the next worker may be killed while it fills the cache
    try:
        arguments = _arguments(site, name, prompt, n, rng.randint(1, 8), folder / "dump")
        lives = [_live(arguments, worker, site, _Moment.draw(rng)) for _ in range(rng.randint(1, 3))]
        lives.append(_live(arguments, worker, site, None))
    finally:
        shutil.rmtree(folder)
    _check_lives(site, name, prompt, lives, n)


def _check_lives(site: Site, name: str, prompt: Sequence[int], lives: Sequence[Life], n: int) -> None:
    """Require that no acknowledged token is lost, and that the answer equals one without a kill."""
    saved = 0
    for life in lives:
        if life.begins is not None:
            lost = f"a dump with {saved} tokens of the answer was acknowledged as saved before kill -9, and"
            require(life.begins >= saved, f"{lost} the next process started from {life.begins}")
            site.counts["resumptions after kill -9"] += life.begins > 0
        saved = max(saved, life.saved)
    answer = lives[-1].said
    if answer is None:
        raise Wrong("a worker that nobody killed has said nothing")
    with site.fresh_session(name) as session:
        session.append_tokens(prompt)
        expected = session.generate(Sampling(temperature=0, max_tokens=n)).run()
    if answer != expected.tokens:
        resumed = dataclasses.replace(expected, tokens=answer)
        same_greedy(site, name, prompt, resumed, expected, "an answer that was killed and resumed")


@dataclass(frozen=True, slots=True)
class _Moment:
    """The moment at which a worker is killed.

    Attributes:
        delay_s: seconds after its start, or after the acknowledgement.
        n_saved: number of acknowledged dumps to wait for; None for a moment after the start.
    """

    delay_s: float
    n_saved: int | None

    @classmethod
    def draw(cls, rng: random.Random) -> _Moment:
        """Half of the time right after an acknowledgement: a save that is not yet safe would be lost."""
        if rng.random() < 0.5:
            return cls(rng.uniform(0, 0.005), rng.randint(1, 6))
        return cls(rng.uniform(0, 4), None)


def _live(arguments: str, worker: str, site: Site, moment: _Moment | None) -> Life:
    """Start a worker, kill it at a moment, and return its output."""
    cache = site.folder / WORKER_CACHE
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), CACHE_VARIABLE: str(cache)}
    with (
        (site.folder / "worker.err").open("w+b") as errors,
        subprocess.Popen(
            [sys.executable, "-m", worker, arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        watch = threading.Timer(PATIENCE_S, process.send_signal, [signal.SIGABRT])
        watch.start()
        try:
            life = _listen(process, moment)
            status = process.wait()
        finally:
            process.kill()
            watch.cancel()
            watch.join()
        if status != 0 and (moment is None or status != -9):
            errors.seek(0)
            error_text = errors.read().decode("utf-8", "replace").strip()[-2000:]
            raise Wrong(f"a worker ended with status {status}: {error_text}")
        site.counts["kill -9"] += status == -9
        return life


def _listen(process: subprocess.Popen[str], moment: _Moment | None) -> Life:
    """Read a worker's lines until it ends; kill it at the moment."""
    life, n_saved = Life(), 0
    timer = threading.Timer(moment.delay_s, process.kill) if moment else None
    if timer is not None and moment is not None and moment.n_saved is None:
        timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        mark, word, value = [*line.split(maxsplit=2), "", "", ""][:3]
        if mark != MARK:
            continue
        if word == "begins":
            life.begins = int(value)
        elif word == "said":
            life.said = tuple(json.loads(value))
        elif word == "saved":
            life.saved, n_saved = int(value), n_saved + 1
            if timer is not None and moment is not None and n_saved == moment.n_saved:
                timer.start()
    if timer is not None:
        timer.cancel()
    return life


def _arguments(site: Site, name: str, prompt: Sequence[int], n: int, every: int, dump: Path) -> str:
    engine = site.engine
    return json.dumps(
        {
            "backend": engine.backend,
            "path": str(site.path(name)),
            "device": engine.device,
            "n_threads": engine.n_threads,
            "load_options": dict(engine.load_options),
            "sizes": [N_CTX, 2, N_BATCH],
            "kv_type": site.workshop.kv_types(name)[0],
            "prompt": list(prompt),
            "max_tokens": n,
            "every": every,
            "dump": str(dump),
        }
    )


def _forget_cache(cache: Path) -> None:
    """Remove all complete entries, and make the incomplete ones of killed workers two days old."""
    for manifest in cache.glob("*/[!.]*/manifest.json"):
        shutil.rmtree(manifest.parent)
    for partial in cache.glob("*/.*"):
        for path in (partial, *partial.iterdir()):
            os.utime(path, (time.time() - 2 * 86400,) * 2)

"""slm-core: run a small language model on whichever engine suits, behind one contract.

``load`` a model file, then chat, or use contexts and sessions directly::

    import slm_core as slm

    with slm.load(slm.demo_model_path()) as model:
        chat = model.chat(system="You are terse.")
        print(chat.send("My dog is called Rex.").text)

``public`` lists the names. They are imported when one is used for the first time: the command line, and processes that
probe an engine, need a part of the package and do not wait for the rest.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slm_core.public import *  # noqa: F403


def __getattr__(name: str) -> object:
    if find_spec(f"slm_core.{name}"):  # a module of the package
        return import_module(f"slm_core.{name}")
    public = import_module("slm_core.public")
    if name not in (*public.__all__, "__all__"):
        raise AttributeError(f"module 'slm_core' has no attribute {name!r}")
    value = globals()[name] = getattr(public, name)
    return value


def __dir__() -> list[str]:
    return [*import_module("slm_core.public").__all__]

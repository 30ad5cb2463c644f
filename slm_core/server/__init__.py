"""The HTTP server: OpenAI's API over an engine. It needs ``pip install "slm-core[serve]"``.

A protocol module (``openai_chat``, ...) only translates: its request model to a ``GenerationRequest``, and the pieces
of answers to its JSON. The engine, cancellation, errors, event streams and the parsing of answers exist once, below it.
"""

from slm_core.server.app import create_app
from slm_core.server.keys import ApiKey
from slm_core.server.options import ServerOptions
from slm_core.server.registry import EngineSettings, ModelRegistry, ServedAdapter, ServedModel

__all__ = ["ApiKey", "EngineSettings", "ModelRegistry", "ServedAdapter", "ServedModel", "ServerOptions", "create_app"]

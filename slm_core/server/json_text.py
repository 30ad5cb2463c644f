"""JSON as the server writes it."""

from __future__ import annotations

import json

import msgspec

_ENCODER = msgspec.json.Encoder()


def encoded(value: object) -> bytes:
    """The JSON text of a value. Surrogates without a partner, which JSON may contain but UTF-8 may not, are escaped."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()

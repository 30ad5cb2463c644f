"""Chat formats by name: one family a file, each a template in our own words that gives the official one's bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slm_core.plugins import FormatterSource
from slm_formatters.template import TemplateFormatter


def family(source: FormatterSource, name: str, template: str, *, stops: Sequence[str] = ()) -> TemplateFormatter:
    """A formatter with the family's template in place of the model's own, and with the model's tokens.

    Args:
        source: what the model has.
        name: the family's.
        template: jinja, in the dialect of transformers.
        stops: texts that end an answer, for models whose vocabulary does not say which tokens do.
    """
    own = dataclasses.replace(source, template=template, templates={}, origin=name)
    return TemplateFormatter(own, stops=stops)

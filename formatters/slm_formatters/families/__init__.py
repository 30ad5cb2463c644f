"""Chat formats by name, one family per file. Our templates render the same bytes as the official ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slm_core.plugins import FormatterSource
from slm_formatters.template import TemplateFormatter


def family(source: FormatterSource, name: str, template: str, *, stops: Sequence[str] = ()) -> TemplateFormatter:
    """A formatter with the family's template instead of the model's, and with the model's tokens.

    Args:
        source: the model's templates and tokens.
        name: the name of the family.
        template: a jinja template, in the dialect of transformers.
        stops: texts that end an answer, for models whose vocabulary has no EOG tokens for them.
    """
    family_source = dataclasses.replace(source, template=template, templates={}, origin=name)
    return TemplateFormatter(family_source, stops=stops)

"""Chat formats: a model's own jinja template, named families, and parsers that read answers back."""

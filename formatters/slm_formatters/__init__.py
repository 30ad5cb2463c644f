"""Chat formats: the model's jinja template, named families, and parsers of answers."""

"""The torch tier: any device of torch's, weights packed in its memory as they lie in the file.

Importing this package imports no torch; its modules do.
"""

"""The torch tier: any torch device, with weights in its memory in the quantized form of the file.

Importing this package does not import torch; its modules do.
"""

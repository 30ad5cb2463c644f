"""Broken toys: each breaks one promise of the contract, and names the scenario that must notice.

Each is a backend like any other: ``pytest --slm-backend slm_conformance.mutants.edits:CutUpwards``.
"""

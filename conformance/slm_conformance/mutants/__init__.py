"""Mutants of the toy: each breaks one promise of the contract, and names the scenario that kills it.

Each is a backend like any other: ``pytest --slm-backend slm_conformance.mutants.edits:CutUpwards``.
"""

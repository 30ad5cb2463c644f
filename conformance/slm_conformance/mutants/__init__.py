"""Mutants of the toy: each breaks one promise of the contract and names the scenario that kills it.

Each mutant can be tested like any other backend: ``pytest --slm-backend slm_conformance.mutants.edits:CutUpwards``.
"""

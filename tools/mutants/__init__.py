"""Mutation testing of the project's own code: which small mistakes do the tests notice?"""

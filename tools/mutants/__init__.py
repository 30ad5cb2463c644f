"""Mutation of the project's own code: which small slips do the tests notice?"""

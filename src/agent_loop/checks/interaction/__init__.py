"""Conformance checks of interactions: does an implementation of `BaseInteraction` follow its contract?"""

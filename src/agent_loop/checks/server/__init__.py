"""Conformance checks of servers: does an implementation of `AsyncServerBase` follow its contract?"""

"""Conformance checks of tools: does an implementation of `BaseTool` follow its contract?"""

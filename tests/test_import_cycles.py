"""Test that modules import each other without cycles, including imports for type checkers."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest


def test_modules_import_each_other_without_cycles() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("agent_loop", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))

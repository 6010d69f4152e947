from __future__ import annotations

import pytest

from examples.run import EXIT_ERROR, RECIPES, main


def test_help_lists_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)


def test_an_unknown_example_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no_such_example"])
    assert ended.value.code == EXIT_ERROR
    assert "no_such_example" in capsys.readouterr().err

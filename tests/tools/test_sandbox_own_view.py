"""Properties of the mechanisms that hide the host."""

import pytest

from tests.tools.sandboxes import SMALL, WITH_OWN_VIEW, talk

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("mechanism")]


@pytest.fixture(params=WITH_OWN_VIEW)
def mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "mechanism", request.param)


def test_only_the_sandboxs_own_processes_are_visible() -> None:
    (answer,) = talk("import os; sorted(name for name in os.listdir('/proc') if name.isdecimal())")
    assert answer.text == "['1', '2']"


@pytest.mark.parametrize("folder", [".", "/tmp", "/dev/shm"])
def test_a_full_disk_is_reported_for_every_writable_folder(folder: str) -> None:
    fill = f"for i in range(100):\n    with open(f'{folder}/{{i}}', 'wb') as file: file.write(bytes(2**20))"
    full, after = talk(fill, "1 + 1")
    assert "OSError: [Errno 28] No space left on device" in full.text
    assert after.text == "2"


def test_files_of_the_host_do_not_exist_inside(tmp_path: object) -> None:
    (answer,) = talk(f"import os; os.path.exists({str(tmp_path)!r}), os.listdir('/tmp')")
    assert answer.text == "(False, [])"

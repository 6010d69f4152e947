"""The documentation names only what exists: pages, sections, files, modules, settings, metrics and commands."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel

import agent_loop.api
import agent_loop.checks
import agent_loop.training
from agent_loop.cli import app
from agent_loop.config import Config, load_config
from agent_loop.config.verl.translation import row_of
from agent_loop.storage.schema import METADATA

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "agent_loop"
PAGES = [
    *ROOT.glob("*.md"),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
METADATA_KEYS = {getattr(METADATA, name) for name in METADATA.__slots__}
COMMANDS: Any = typer.main.get_command(app)
SECTIONS = "|".join(Config.model_fields)
VERL_CONSTANTS = {"rollout.calculate_log_probs"}
"""Settings of verl that a loop can read, but that nobody can set."""
CLEAR = """
    betas custom_async_server device entropy_coeff keep_checkpoints lr max_assistant_turns max_ratio num_cpus_per_server
    num_servers num_workers seed shuffle temperature top_k top_p trust_remote_code val_before_train weight_decay
"""
"""Settings without a description."""
METRIC_SECTIONS = "actor|critic|reward|rollout|perf|storage|time|timing_s|tools|val"


@functools.cache
def load_generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_code(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Zensical and GitHub derive them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def is_module_or_name(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a name that occurs in the module before it."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), -1, -1):
        path = PACKAGE.joinpath(*parts[:length])
        sources = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else []
        if path.is_dir():
            sources = [path / "__init__.py", *path.glob("*.py")]
        if sources:
            texts = [source.read_text(encoding="utf-8") for source in sources if source.is_file()]
            return all(any(re.search(rf"\b{name}\b", text) for text in texts) for name in parts[length:])
    return False


def is_setting(dotted: str) -> bool:
    for key in (dotted, f"actor_rollout_ref.{dotted}"):
        if row_of(key) is not None:
            return True
    if dotted in VERL_CONSTANTS:
        return True
    section: Any = Config
    for name in dotted.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return not isinstance(section, type)  # a key inside a mapping
        if name not in section.model_fields:
            return False
        section = section.model_fields[name].annotation
    return True


def commands(group: Any = COMMANDS, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the command of each command and group of commands."""
    for name, command in group.commands.items():
        yield prefix + name, command
        yield from commands(command, f"{prefix}{name} ") if hasattr(command, "commands") else ()


@pytest.mark.parametrize("name", ["generate_reference", "generate_metrics"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    generator = load_generator(name)
    assert generator.TARGET.read_text(encoding="utf-8") == generator.render()


def test_every_setting_is_documented_or_clear_by_its_name() -> None:
    table = load_generator("generate_reference").render()
    settings = re.findall(r"^\| `([\w.]+)` \| [^|]* \|(.*)\|$", table, flags=re.MULTILINE)
    assert len(settings) > 200
    assert {key.rpartition(".")[2] for key, text in settings if not text.strip()} <= set(CLEAR.split())


def test_the_diagrams_are_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = load_generator("generate_diagrams")
    monkeypatch.setattr(generator, "FOLDER", tmp_path)
    for draw in (each for name, each in vars(generator).items() if name.startswith("draw_")):
        draw()
    drawn = {path.name: text_of(path) for path in tmp_path.iterdir()}
    assert drawn
    assert drawn == {name: text_of(DOCS / "images" / name) for name in drawn}


def wrong_links(page: Path) -> Iterator[str]:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", without_code(page)):
        linked = page.parent / target if target else page
        is_outside = page.is_relative_to(DOCS) and not linked.resolve().is_relative_to(DOCS)
        if not linked.exists() or is_outside or (anchor and anchor not in anchors(linked)):
            yield f"{target}#{anchor}"


def wrong_names(page: Path) -> Iterator[str]:
    """Yield the files, settings, metrics and commands on a page that do not exist."""
    metrics = load_generator("generate_metrics").step_metrics()
    prefixes = tuple(
        name for name in metrics if name.endswith(("/", "_")) and name not in ("actor/", "time/")
    )
    names = dict(commands())
    for span in code_spans(page):
        is_file = re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|md|sh)", span)
        if is_file and not any((folder / span).exists() for folder in (ROOT, PACKAGE, page.parent)):
            yield span
        settings = re.findall(rf"^((?:{SECTIONS})(?:\.(?!py\b)\w+)+)(?:[=:]|$)", span)
        yield from (dotted for dotted in settings if not is_setting(dotted))
        is_metric = re.fullmatch(rf"({METRIC_SECTIONS})/[a-z][a-z0-9_/]*", span)
        if is_metric and span not in metrics and not span.startswith(prefixes):
            yield span
        command = re.match(r"agent-loop ((?:check [a-z]+)|[a-z][a-z-]*)", span)
        if command and command[1] not in names:
            yield span


def wrong_modules(page: Path) -> Iterator[str]:
    for dotted in re.findall(r"(?<![\w.])agent_loop(?:\.\w+)+", text_of(page)):
        if dotted not in METADATA_KEYS and not is_module_or_name(dotted):
            yield dotted


@pytest.mark.parametrize("find", [wrong_links, wrong_names, wrong_modules])
def test_every_link_and_name_on_the_pages_leads_somewhere(find: Callable[[Path], Iterator[str]]) -> None:
    assert {str(page): wrong for page in PAGES if (wrong := list(find(page)))} == {}


def test_the_reference_has_every_public_name_once() -> None:
    modules = (agent_loop, agent_loop.api, agent_loop.checks, agent_loop.training)
    pages = "\n".join(text_of(page) for page in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: agent_loop\.(?:[\w.]+\.)?(\w+)$", pages, flags=re.MULTILINE)
    assert {name: shown.count(name) for module in modules for name in module.__all__} == {
        name: 1 for module in modules for name in module.__all__
    }


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = re.findall(r'= "([\w/-]+\.md)"', text_of(ROOT / "zensical.toml"))
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


def test_the_architecture_lists_the_layers_and_every_package() -> None:
    page = text_of(ROOT / "docs" / "architecture.md")
    contracts = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = [layer.replace(" | ", ", ") for layer in contracts[0]["layers"] if layer != "__main__"]
    [shown] = re.findall(r"```\n(api.*?)```", page, flags=re.DOTALL)
    assert shown.splitlines() == layers
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    rooms = page.partition("## Rooms")[2].partition("\n## ")[0]
    assert packages <= set(re.findall(r"`(\w+)`", rooms))


def printed_commands() -> Iterator[tuple[str, str]]:
    """Yield the commands in `--help` and in blocks of pages, with their places."""
    for name, command in commands():
        for line in re.findall(r"^\s*(agent-loop \S.*)$", command.help or "", flags=re.MULTILINE):
            yield f"{name} --help", line
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text_of(page), flags=re.DOTALL):
            for line in re.findall(r"^(agent-loop \S.*)$", block.replace("\\\n", " "), flags=re.MULTILINE):
                yield str(page.relative_to(ROOT)), line


@pytest.mark.parametrize(("where", "line"), list(printed_commands()))
def test_a_printed_command_has_the_options_and_settings_that_it_uses(where: str, line: str) -> None:
    line = re.split(r" \| | > | && |; ", line)[0]
    _, name, *arguments = shlex.split(line, comments=True)
    if "--help" in arguments:
        return
    if hasattr(COMMANDS.commands[name], "commands"):
        if not arguments and COMMANDS.commands[name].invoke_without_command:
            return
        name = f"{name} {arguments.pop(0)}"
    # (raises a usage error if an option does not exist)
    dict(commands())[name].make_context(name, arguments)
    if name != "check sandbox":
        settings = [each for each in arguments if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=.*", each)]
        load_config(overrides=[setting for setting in settings if "..." not in setting])

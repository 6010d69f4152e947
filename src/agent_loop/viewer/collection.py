"""Runs and evaluations that are shown together: settings, groups, curves with bands over the seeds, and prompts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, TypeAlias

from agent_loop.errors import DataError
from agent_loop.files.file_kinds import find_runs
from agent_loop.storage.run import StoredRun, parquet_files
from agent_loop.training.evaluation.runs import RunGroup, TrainingRun, compare_metric
from agent_loop.training.evaluation.scores import prompt_digest, prompt_text
from agent_loop.training.metrics import REWARD_MEAN, STEP
from agent_loop.viewer.evaluations import estimate_values
from agent_loop.viewer.run_files import stamp_of
from agent_loop.viewer.run_record import HELD_OUT, RunRecord
from agent_loop.viewer.source import RunSource


class RunCollection:
    """Runs and evaluations at some paths and below them. Runs that appear later are found too.

    Nothing is read of a run before a page needs it. Methods are thread-safe.

    Args:
        paths: Folders of runs, runs, or files of trajectories.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.resolve() for path in paths]
        self._lock = threading.Lock()
        self._names: dict[Path, str] = {}
        self._sources: dict[str, RunSource] = {}
        self._records: dict[str, RunRecord] = {}
        self.prompts = PromptIndex()

    def folders(self) -> dict[str, Path]:
        """Return the folders of the runs that exist now, by key. A key is part of the addresses of a run."""
        with self._lock:
            found = find_runs(self._paths)
            for path in found:
                if path not in self._names:
                    self._names[path] = _unused(_name_of(path, self._paths), {*self._names.values()})
            return {self._names[path].replace("/", "~"): path for path in found}

    def source(self, key: str) -> RunSource:
        """Return the data of a run."""
        if key not in self._sources:
            path = self.folders().get(key)
            if path is None:
                raise DataError(f"there is no run {key!r}; it may have been removed")
            self._sources[key] = RunSource(path)
        return self._sources[key]

    def record(self, key: str, path: Path) -> RunRecord:
        """Return the settings and metrics of a run."""
        return self._records.setdefault(key, RunRecord(path))

    def records(self) -> dict[str, RunRecord]:
        """Return the settings and metrics of all runs that exist now."""
        return {key: self.record(key, path) for key, path in self.folders().items()}

    def runs(self) -> dict[str, Any]:
        """Return one entry per run, and the settings that differ between them."""
        records = self.records()
        settings = {key: record.settings() for key, record in records.items()}
        differing = differing_settings(settings)
        changed = changed_settings(differing)
        groups = groups_of(records)
        return {
            "name": ", ".join(path.name for path in self._paths),
            "path": ", ".join(map(str, self._paths)),
            "now": time.time(),
            "differing": differing,
            "runs": [
                _entry(key, record)
                | {"name": key.replace("~", "/"), "group": groups.get(key), "changed": changed.get(key, {})}
                for key, record in records.items()
            ],
        }


def groups_of(records: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return the name of the group of each training run: A, B, ..., Z, A2, B2, ...

    The runs of a group differ in their seeds alone. Evaluations are in no group.
    """
    settings = {key: record.settings() for key, record in records.items() if record.latest()}
    names: dict[str, str] = {}
    for number, runs in enumerate(seed_groups(settings)):
        again, letter = divmod(number, len(ascii_uppercase))
        names |= dict.fromkeys(runs, ascii_uppercase[letter] + (str(again + 1) if again else ""))
    return names


def _entry(key: str, record: RunRecord) -> dict[str, Any]:
    settings: Mapping[str, Any] = record.settings()
    latest = record.latest()
    summary = None if latest else record.summary()
    scores = summary and summary.evaluation.scores
    reward = scores and scores.mean_reward
    is_unfinished = record.is_unfinished_evaluation
    return {
        "key": key,
        "kind": "evaluation" if summary or is_unfinished else "run",
        "has_pages": not is_unfinished,
        "model": settings.get("model.path") or (summary and summary.model),
        "seed": seed_of(settings),
        "step": latest.get(STEP),
        "total_steps": settings.get("trainer.total_steps"),
        "reward": latest.get(REWARD_MEAN),
        "held_out": latest.get(HELD_OUT, reward and reward.value),
        "is_finished": summary is not None,
        "changed_at": record.changed_at(),
    }


def _name_of(path: Path, roots: Sequence[Path]) -> str:
    """Return the path of a run below the folder that all given paths share."""
    shared = Path(os.path.commonpath([root if root != path else root.parent for root in roots]))
    return path.relative_to(shared).as_posix() if path.is_relative_to(shared) else path.name


def _unused(name: str, used: set[str]) -> str:
    number, candidate = 2, name
    while candidate in used:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


PLACES = frozenset({"trainer.run_dir", "trainer.experiment_name"})
"""Settings that name a run and do not change it."""
ABSENT = "-"
"""Shown for a setting that a run lacks."""


def differing_settings(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the settings that are not equal in all runs: by setting, the value in each run as text.

    Args:
        runs: Settings by dotted name, by run. Runs without settings are left out.
    """
    texts = {run: _texts(settings) for run, settings in runs.items() if settings}
    names = sorted({name for settings in texts.values() for name in settings})
    by_name = {name: {run: found.get(name, ABSENT) for run, found in texts.items()} for name in names}
    return {name: values for name, values in by_name.items() if len(set(values.values())) > 1}


def changed_settings(differing: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return for each run the settings, seeds excepted, that differ from the most common value of all runs."""
    changed: dict[str, dict[str, str]] = {}
    for name, values in differing.items():
        (usual, _), *_ = Counter(values.values()).most_common(1)
        for run, value in values.items():
            if value != usual and not is_seed(name):
                changed.setdefault(run, {})[name] = value
    return changed


def seed_groups(runs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return groups of runs whose settings differ in their seeds alone. A run without settings is a group."""
    groups: dict[str, list[str]] = {}
    for run, settings in runs.items():
        others = {name: text for name, text in _texts(settings).items() if not is_seed(name)}
        groups.setdefault(json.dumps(others, sort_keys=True) if others else f"alone: {run}", []).append(run)
    return list(groups.values())


def seed_of(settings: Mapping[str, Any]) -> Any:
    return settings.get("trainer.seed")


def is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == "seed"


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text, without those that name the run. Paths in the run's folder are made equal."""
    run_dir = settings.get("trainer.run_dir")
    texts: dict[str, str] = {}
    for name, value in settings.items():
        if name in PLACES:
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        texts[name] = text.replace(run_dir, "{run_dir}") if isinstance(run_dir, str) and run_dir else text
    return texts


NUM_RECENT = 10
"""Number of last steps of the mean in the table."""


def metric_names(collection: RunCollection) -> list[str]:
    """Return the names of the metrics of all runs."""
    return sorted({name for record in collection.records().values() for name in record.curves()})


def seed_curves(collection: RunCollection, names: Sequence[str]) -> dict[str, Any]:
    """Return for each metric the curve of each run, and of each group the mean and its band."""
    records = collection.records()
    groups = groups_of(records)
    runs = {key: record.training_run() for key, record in records.items() if key in groups}
    return {name: _curves_of(name, runs, groups) for name in names}


def _curves_of(name: str, runs: Mapping[str, TrainingRun], groups: Mapping[str, str]) -> dict[str, Any]:
    having = {key: run for key, run in runs.items() if name in run.curves}
    members: defaultdict[str, list[TrainingRun]] = defaultdict(list)
    for key, run in having.items():
        members[groups[key]].append(run)
    return {
        "runs": {
            key: [list(run.curves[name]), list(run.curves[name].values())] for key, run in having.items()
        },
        "groups": {group: _band(name, RunGroup(group, tuple(found))) for group, found in members.items()},
    }


def _band(name: str, group: RunGroup) -> dict[str, Any] | None:
    """Return the mean of a group with its range and interval at the steps of all its runs; None if there are none."""
    try:
        comparison = compare_metric([group], metric=name, num_recent=NUM_RECENT)
    except DataError:  # no step at which all runs have a value
        return None
    steps = [point.step for point in comparison.curve]
    values = [[run.curves[name][step] for run in group.runs] for step in steps]
    means = [point.groups[0] for point in comparison.curve]
    return {
        "num_runs": len(group.runs),
        "steps": steps,
        "mean": [mean.value for mean in means],
        "min": [min(found) for found in values],
        "max": [max(found) for found in values],
        "low": [mean.value if mean.low is None else mean.low for mean in means],
        "high": [mean.value if mean.high is None else mean.high for mean in means],
        "last": estimate_values(comparison.last.groups[0]),
        "recent": estimate_values(comparison.recent.groups[0]),
        "num_recent": comparison.num_recent,
    }


COLUMNS = ("split", "step", "trajectory_id", "reward", "is_success", "stop_reason", "row")
MAX_PROMPTS = 200
"""Most prompts in a list."""
FilePrompts: TypeAlias = dict[str, tuple[str, list[dict[str, Any]]]]
"""Text and trajectories of each prompt of a file, by the digest of the prompt."""


class PromptIndex:
    """Index of the trajectories by their prompts. Each file is read once, without tokens. Methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[Any, FilePrompts]] = {}
        self._runs: dict[str, list[FilePrompts]] = {}

    def add_run(self, key: str, path: Path) -> int:
        """Read the files of a run that are new, and return how many prompts it has."""
        with self._lock:
            self._runs[key] = [self._read(file) for file in parquet_files(path)]
            return len({digest for file in self._runs[key] for digest in file})

    def listed(self, text: str) -> dict[str, Any]:
        """Return the prompts that contain a text, those of the most runs and trajectories first."""
        found: dict[str, dict[str, Any]] = {}
        wanted = text.casefold()
        for key, files in self._runs.items():
            for file in files:
                for digest, (prompt, samples) in file.items():
                    if wanted in prompt.casefold():
                        entry = found.setdefault(digest, {"digest": digest, "prompt": prompt, "runs": {}})
                        entry["runs"][key] = entry["runs"].get(key, 0) + len(samples)
        ordered = sorted(
            found.values(), key=lambda entry: (-len(entry["runs"]), -sum(entry["runs"].values()))
        )
        return {"num_prompts": len(ordered), "prompts": ordered[:MAX_PROMPTS]}

    def prompt(self, digest: str) -> dict[str, Any]:
        """Return the trajectories of a prompt in each run, in the order of the steps."""
        files = {key: [file[digest] for file in files if digest in file] for key, files in self._runs.items()}
        texts = [text for found in files.values() for text, _ in found]
        runs = {key: [sample for _, samples in found for sample in samples] for key, found in files.items()}
        return {
            "prompt": texts[0] if texts else None,
            "runs": {key: samples for key, samples in runs.items() if samples},
        }

    def _read(self, path: Path) -> FilePrompts:
        stamp = stamp_of(path)
        known = self._files.get(path)
        if known is None or known[0] != stamp:
            known = self._files[path] = stamp, _read_file(path)
        return known[1]


def _read_file(path: Path) -> FilePrompts:
    """Return the prompts of a file; none if it cannot be read."""
    try:
        table = StoredRun(path).scalars(columns=COLUMNS)
    except DataError:
        return {}
    prompts: FilePrompts = {}
    known: dict[str, tuple[str, str]] = {}  # the trajectories of a group have equal rows
    for sample in table.to_pylist():
        document = sample.pop("row")
        if document not in known:
            row = json.loads(document)
            known[document] = prompt_digest(row), prompt_text(row)
        digest, text = known[document]
        prompts.setdefault(digest, (text, []))[1].append(sample)
    return prompts

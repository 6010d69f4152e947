// The runs of a page of several runs, updated while they continue.

import { EvaluationSource } from "./evaluation_source.js";
import { getJson } from "./request.js";
import { QUIET_AFTER_S } from "./run.js";

const POLL_MS = 5000;

export class Collection {
  /** Names and paths of the folders that hold the runs. */
  name = "";
  path = "";
  runs = [];
  /** Values of the settings that differ, by setting and run. */
  differing = {};
  trouble = "";
  isLoaded = false;
  evaluations = new EvaluationSource((run) => addressOf(run));
  #listeners = new Set();
  #last = "";

  /** Calls a listener when the runs have changed. */
  onChange(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Loads the runs, then polls for changes. */
  async follow() {
    for (;;) {
      try {
        this.#take(await getJson("api/runs"));
      } catch (error) {
        this.trouble = error.message;
        this.#say();
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  run(key) {
    return this.runs.find((run) => run.key === key) ?? null;
  }

  /** Returns the groups of runs that differ in their seeds alone: `[{name, runs, label, color}]`. */
  get groups() {
    const names = [...new Set(this.runs.map((run) => run.group).filter(Boolean))];
    return names.map((name, color) => {
      const runs = this.runs.filter((run) => run.group === name);
      return { name, runs, color, label: labelOf(runs) };
    });
  }

  metricNames() {
    return getJson("api/metric-names");
  }

  curves(names) {
    return getJson("api/curves", names.map((name) => ["name", name]));
  }

  /** Reads the prompts of a run, so that lists contain them. */
  indexPrompts(run) {
    return getJson("api/prompt-index", { run });
  }

  prompts(text) {
    return getJson("api/prompts", { text });
  }

  prompt(digest) {
    return getJson("api/prompt", { digest });
  }

  #take({ name, path, now, differing, runs }) {
    Object.assign(this, { name, path, differing, trouble: "" });
    this.runs = runs.map((run) => ({ ...run, status: statusOf(run, now) }));
    const seen = JSON.stringify([this.runs, differing]);
    if (seen === this.#last && this.isLoaded) return;
    this.#last = seen;
    this.isLoaded = true;
    this.#say();
  }

  #say() {
    for (const listener of this.#listeners) listener();
  }
}

/** Returns the address of the pages of a run. */
export function addressOf(run) {
  return `run/${encodeURIComponent(run)}/`;
}

function statusOf(run, now) {
  if (run.is_finished || (run.total_steps && run.step >= run.total_steps)) return "finished";
  return now - run.changed_at < QUIET_AFTER_S ? "running" : "quiet";
}

/** Returns the settings that distinguish a group, or the names of its runs if there are none. */
function labelOf(runs) {
  const changed = Object.entries(runs[0].changed);
  if (changed.length) return changed.map(([name, value]) => `${shortName(name)}=${value}`).join(" ");
  return runs.length === 1 ? runs[0].name : `${runs[0].name} and ${runs.length - 1} more`;
}

export const shortName = (name) => name.split(".").at(-1);

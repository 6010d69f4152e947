// Data of the run that the page has loaded, updated while the run continues.

import { MetricLog } from "./metric_log.js";
import { Table } from "./table.js";

const POLL_MS = 2000;
const FIRST_BATCH = 2;
const LARGEST_BATCH = 64;
export const QUIET_AFTER_S = 120;

export class Run {
  state = null;
  config = null;
  metrics = new MetricLog();
  table = new Table();
  trouble = "";
  /** Whether the table has all stored trajectories. */
  isComplete = false;
  /** Whether all data has been read once. */
  isLoaded = false;
  #files = new Set();
  #listeners = new Set();

  constructor(source) {
    this.source = source;
  }

  /** Calls a listener with the name of the data that changed: `metrics`, `table` or `state`. */
  onChange(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Loads all data, then polls for new data. */
  async follow() {
    for (;;) {
      try {
        await this.update();
        if (this.trouble || !this.isLoaded) {
          this.trouble = "";
          this.isLoaded = true;
          this.#say("state");
        }
      } catch (error) {
        this.trouble = error.message;
        this.#say("state");
      }
      if (!this.source.isLive) return;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async update() {
    const state = await this.source.state();
    if (this.state && state.session !== this.state.session) this.#forget();
    this.state = state;
    this.#say("state");
    await Promise.all([this.#loadTable(state.files), this.#loadMetrics(), this.#loadConfig()]);
  }

  /** Returns the numbers of the files in the table. */
  get files() {
    return [...this.#files];
  }

  async #loadMetrics() {
    if (this.metrics.take(await this.source.metrics(this.metrics.cursor))) this.#say("metrics");
  }

  async #loadConfig() {
    if (this.config) return;
    this.config = await this.source.config();
    if (this.config) this.#say("state");
  }

  async #loadTable(numbers) {
    const wanted = new Set(numbers);
    const hasGone = [...this.#files].some((number) => !wanted.has(number));
    if (hasGone) {
      this.table.keepFiles(wanted);
      this.#files = new Set([...this.#files].filter((number) => wanted.has(number)));
    }
    const missing = numbers.filter((number) => !this.#files.has(number)).reverse();
    let size = this.source.isLive ? FIRST_BATCH : missing.length;
    for (let start = 0; start < missing.length; start += size, size = Math.min(4 * size, LARGEST_BATCH)) {
      const batch = missing.slice(start, start + size);
      this.table.append(await this.source.table(batch));
      for (const number of batch) this.#files.add(number);
      this.isComplete = start + size >= missing.length;
      this.#say("table");
    }
    if (hasGone || !this.isComplete) {
      this.isComplete = true;
      this.#say("table");
    }
  }

  #forget() {
    this.metrics = new MetricLog();
    this.table = new Table();
    this.#files.clear();
    this.config = null;
  }

  #say(what) {
    for (const listener of this.#listeners) listener(what);
  }

  /** Number of training steps in the configuration; null if unknown. */
  get totalSteps() {
    return this.config?.trainer?.total_steps ?? null;
  }

  get status() {
    if (!this.source.isLive) return "exported";
    if (!this.state) return "loading";
    if (this.totalSteps !== null && this.metrics.lastStep >= this.totalSteps) return "finished";
    const quiet = this.state.now - this.state.changed_at;
    return quiet < QUIET_AFTER_S ? "running" : "quiet";
  }
}

// Metrics by step.

export class MetricLog {
  #series = new Map();
  steps = [];
  lines = [];
  cursor = "";
  numDamaged = 0;

  /** Adds new metrics. Returns whether there were any. */
  take({ cursor, is_new, lines, num_damaged }) {
    if (is_new) {
      this.#series.clear();
      this.steps = [];
      this.lines = [];
    }
    this.cursor = cursor;
    this.numDamaged += num_damaged;
    for (const line of lines) {
      this.lines.push(line);
      this.steps.push(line.step);
      for (const [name, value] of Object.entries(line))
        if (name !== "step") this.#add(name, line.step, value);
    }
    return is_new || lines.length > 0;
  }

  get names() {
    return [...this.#series.keys()];
  }

  /** Returns `{steps, values}` of a metric; null if it was never measured. Values may be null. */
  series(name) {
    return this.#series.get(name) ?? null;
  }

  /** Returns the last value of a metric, or the value `back` measurements earlier. */
  latest(name, back = 0) {
    const values = this.#series.get(name)?.values.filter((value) => value !== null);
    return values?.at(-1 - back) ?? null;
  }

  get lastStep() {
    return this.steps.at(-1) ?? null;
  }

  #add(name, step, value) {
    if (!this.#series.has(name)) this.#series.set(name, { steps: [], values: [] });
    const series = this.#series.get(name);
    series.steps.push(step);
    series.values.push(typeof value === "number" ? value : null);
  }
}

// Metrics by step.

export class MetricLog {
  #series = new Map();
  steps = [];
  lines = [];
  cursor = "";
  numDamaged = 0;

  /** Whether something came. */
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

  /** `{steps, values}`; null where it was never measured. Values may be null. */
  series(name) {
    return this.#series.get(name) ?? null;
  }

  /** The last number, or the one `back` measurements before it. */
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

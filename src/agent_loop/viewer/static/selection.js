// Selection of the table's rows and their order, from the parameters of the address.

import { compileFilter, passing, sortRows } from "./filters.js";

const PREFIX = "f.";
/** Duration of a request of a search that is short enough to ask for more files with the next one, in ms. */
const QUICK_MS = 120;
const LARGEST_BATCH = 256;

/** The shown rows, kept so that a trajectory's page can find the next one. */
export class Selection {
  rows = new Uint32Array(0);
  errors = new Map();

  /**
   * @param parameters  Parameters of the address: filters `f.NAME`, and the column `sort`, with `-` for descending.
   * @param search  Result of a search, or null.
   */
  compute(table, parameters, search) {
    this.errors = new Map();
    const tests = [];
    for (const [name, text] of filtersOf(parameters)) {
      try {
        const test = compileFilter(text, table.column(name));
        if (test) tests.push(test);
      } catch (error) {
        if (table.length) this.errors.set(name, error.message);
      }
    }
    if (search) tests.push(search.test(table));
    this.rows = passing(table.length, tests);
    const { name, isDescending } = sortOf(parameters, table);
    if (table.has(name)) sortRows(this.rows, table.column(name), isDescending);
    return this.rows;
  }

  /** Returns the row `by` positions after a row in this order; null at the ends and for a row that is not shown. */
  beside(row, by) {
    const place = this.rows.indexOf(row);
    return place < 0 ? null : (this.rows[place + by] ?? null);
  }
}

export function* filtersOf(parameters) {
  for (const [name, text] of parameters) if (name.startsWith(PREFIX)) yield [name.slice(PREFIX.length), text];
}

export function sortOf(parameters) {
  const sort = parameters.get("sort") ?? "-step";
  return { name: sort.replace(/^-/, ""), isDescending: sort.startsWith("-") };
}

/** Search for the rows that contain a text, file by file, newest file first. */
export class Search {
  #found = new Map();
  #isOver = false;
  #isRunning = false;
  numSearched = 0;

  constructor(text, run) {
    this.text = text;
    this.run = run;
  }

  /** Searches the files that were not searched yet, and calls `onPart` after each result. */
  async go(onPart) {
    if (this.#isRunning) return;
    this.#isRunning = true;
    try {
      await this.#searchAll(onPart);
    } finally {
      this.#isRunning = false;
    }
  }

  async #searchAll(onPart) {
    let batch = 2;
    for (;;) {
      const missing = this.run.files.filter((file) => !this.#found.has(file)).sort((a, b) => b - a);
      if (this.#isOver || !missing.length) return;
      const asked = missing.slice(0, batch);
      const began = performance.now();
      const rows = await this.run.source.search(this.text, asked);
      for (const file of asked) this.#found.set(file, new Set(rows[file] ?? []));
      this.numSearched = this.#found.size;
      if (performance.now() - began < QUICK_MS) batch = Math.min(4 * batch, LARGEST_BATCH);
      if (!this.#isOver) onPart();
    }
  }

  stop() {
    this.#isOver = true;
  }

  test(table) {
    const [files, rows] = [table.column("file")?.values, table.column("row_in_file")?.values];
    return (row) => this.#found.get(files[row])?.has(rows[row]) ?? false;
  }
}

/** The last shown selection. */
export const selection = new Selection();
export const lastShown = { address: "#/trajectories" };

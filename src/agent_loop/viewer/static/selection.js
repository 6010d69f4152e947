// Which rows of the table are shown, in which order: what the address asks for.

import { compileFilter, passing, sortRows } from "./filters.js";

const PREFIX = "f.";

/** The rows that are shown, kept here so that a trajectory's page knows the next one. */
export class Selection {
  rows = new Uint32Array(0);
  errors = new Map();

  /**
   * @param parameters  Of the address: `f.NAME` are filters, `sort` is a column, `-` before it for the largest first.
   * @param search  What a search found, or null.
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

  /** The row `by` places from one in this order; null at the ends, and for a row that is not shown. */
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

/** Asks the source which rows contain a text, file by file, the newest first. */
export class Search {
  #found = new Map();
  #isOver = false;
  numSearched = 0;

  constructor(text, run) {
    this.text = text;
    this.run = run;
  }

  /** Calls `onPart` as results come. */
  async go(onPart) {
    let batch = 1;
    for (;;) {
      const missing = this.run.files.filter((file) => !this.#found.has(file)).sort((a, b) => b - a);
      if (this.#isOver || !missing.length) return;
      const asked = missing.slice(0, batch);
      const rows = await this.run.source.search(this.text, asked);
      for (const file of asked) this.#found.set(file, new Set(rows[file] ?? []));
      this.numSearched = this.#found.size;
      batch = Math.min(2 * batch, 16);
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

/** The selection that was shown last. */
export const selection = new Selection();
export const lastShown = { address: "#/trajectories" };

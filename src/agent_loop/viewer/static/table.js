// Table of the scalar columns of all trajectories, as plain arrays.

const WIDER = [Uint8Array, Int32Array, Float32Array, Float64Array];
export const NO_CODE = -1;

export class Table {
  #columns = new Map();
  length = 0;

  get names() {
    return [...this.#columns.keys()];
  }

  has(name) {
    return this.#columns.has(name);
  }

  /** Returns a column `{values, dictionary, kind}`; kind is text, flag or number. */
  column(name) {
    return this.#columns.get(name);
  }

  /** Returns a value: a number, string, boolean or null. */
  value(name, row) {
    const column = this.#columns.get(name);
    if (!column) return null;
    const value = column.values[row];
    if (column.kind === "text") return value === NO_CODE ? null : column.dictionary[value];
    if (column.kind === "flag") return value > 1 ? null : value === 1;
    return Number.isNaN(value) ? null : value;
  }

  /** Adds the rows of a packet. */
  append({ columns }) {
    const added = columns.values().next().value?.values.length ?? 0;
    if (!added) return;
    for (const name of new Set([...this.names, ...columns.keys()])) {
      const old = this.#columns.get(name);
      const more = columns.get(name);
      this.#columns.set(name, joined(old, more, this.length, added));
    }
    this.length += added;
  }

  /** Removes all rows that are not from these files. */
  keepFiles(numbers) {
    const files = this.#columns.get("file")?.values;
    if (!files || files.every((file) => numbers.has(file))) return;
    const kept = Uint32Array.from(files.keys()).filter((row) => numbers.has(files[row]));
    for (const column of this.#columns.values()) {
      const values = new column.values.constructor(kept.length);
      for (let place = 0; place < kept.length; place++) values[place] = column.values[kept[place]];
      column.values = values;
    }
    this.length = kept.length;
  }
}

function joined(old, more, before, added) {
  const kind = old?.kind ?? kindOf(more);
  if (kind === "text") return joinedTexts(old, more, before, added);
  const Wide = WIDER[Math.max(widthOf(old), widthOf(more), old && more ? 0 : kind === "flag" ? 0 : 2)];
  const values = new Wide(before + added).fill(kind === "flag" ? 2 : NaN);
  if (old) values.set(old.values);
  if (more && kindOf(more) === kind) values.set(more.values, before);
  return { kind, values, dictionary: null };
}

function joinedTexts(old, more, before, added) {
  const dictionary = old?.dictionary ?? [];
  const codes = old?.codes ?? new Map();
  const values = new Int32Array(before + added).fill(NO_CODE);
  if (old) values.set(old.values);
  if (more?.dictionary) {
    const translated = more.dictionary.map((text) => codeOf(text, dictionary, codes));
    for (let row = 0; row < added; row++) {
      const code = more.values[row];
      values[before + row] = code < 0 ? NO_CODE : translated[code];
    }
  }
  return { kind: "text", values, dictionary, codes };
}

function codeOf(text, dictionary, codes) {
  let code = codes.get(text);
  if (code === undefined) {
    code = dictionary.push(text) - 1;
    codes.set(text, code);
  }
  return code;
}

function kindOf(column) {
  if (column.dictionary) return "text";
  return column.values instanceof Uint8Array ? "flag" : "number";
}

function widthOf(column) {
  return column ? WIDER.indexOf(column.values.constructor) : 0;
}

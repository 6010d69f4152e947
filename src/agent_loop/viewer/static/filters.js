// Compiles the filter text above a column to a test of rows.

/** Help texts with the filter syntax. */
export const NUMBER_FORMS = "as in 1, >0.5, <=3, 2..5, !0, none, !none";
export const TEXT_FORMS = "as in word, =exact, one|other, !word, none, !none";

/** Returns a predicate of a row; null if the text is empty. Throws an Error with a message for the user. */
export function compileFilter(text, column) {
  const wanted = text.trim();
  if (!wanted) return null;
  if (!column) throw new Error("there is no such column");
  if (/^!?none$/i.test(wanted)) return missing(column, wanted.startsWith("!"));
  if (column.kind === "text") return textTest(wanted, column);
  return column.kind === "flag" ? flagTest(wanted, column) : numberTest(wanted, column);
}

function missing({ kind, values }, isThere) {
  if (kind === "text") return (row) => values[row] >= 0 === isThere;
  if (kind === "flag") return (row) => values[row] < 2 === isThere;
  return (row) => !Number.isNaN(values[row]) === isThere;
}

function flagTest(wanted, { values }) {
  const found = { yes: 1, true: 1, 1: 1, no: 0, false: 0, 0: 0 }[wanted.toLowerCase()];
  if (found === undefined) throw new Error("enter yes, no or none");
  return (row) => values[row] === found;
}

function textTest(wanted, { values, dictionary }) {
  const isNot = wanted.startsWith("!");
  const parts = (isNot ? wanted.slice(1) : wanted).toLowerCase().split("|").filter(Boolean);
  const isIt = Uint8Array.from(dictionary, (text) => (matches(text.toLowerCase(), parts) ? 1 : 0));
  return isNot
    ? (row) => values[row] < 0 || !isIt[values[row]]
    : (row) => values[row] >= 0 && isIt[values[row]] === 1;
}

function matches(text, parts) {
  return parts.some((part) => (part.startsWith("=") ? text === part.slice(1) : text.includes(part)));
}

function numberTest(wanted, { values }) {
  const range = /^(.+?)\.\.(.+)$/.exec(wanted);
  if (range) {
    const [least, most] = [parsed(range[1]), parsed(range[2])];
    return (row) => values[row] >= least && values[row] <= most;
  }
  const [, sign, rest] = /^(>=|<=|!=|!|>|<|=)?\s*(.*)$/.exec(wanted);
  const limit = parsed(rest);
  const single = Math.fround(limit);
  const isSame = (value) => value === limit || (values instanceof Float32Array && value === single);
  return (
    {
      ">": (row) => values[row] > limit && !isSame(values[row]),
      "<": (row) => values[row] < limit && !isSame(values[row]),
      ">=": (row) => values[row] >= limit || isSame(values[row]),
      "<=": (row) => values[row] <= limit || isSame(values[row]),
      "!": (row) => !isSame(values[row]),
      "!=": (row) => !isSame(values[row]),
    }[sign] ?? ((row) => isSame(values[row]))
  );
}

function parsed(text) {
  const value = Number(text.trim());
  if (!text.trim() || Number.isNaN(value)) throw new Error(NUMBER_FORMS);
  return value;
}

/** Returns the rows that pass all tests, in the order of the table. */
export function passing(length, tests) {
  const rows = new Uint32Array(length);
  let count = 0;
  for (let row = 0; row < length; row++) {
    let passes = true;
    for (let index = 0; passes && index < tests.length; index++) passes = tests[index](row);
    if (passes) rows[count++] = row;
  }
  return rows.subarray(0, count);
}

/** Sorts rows in place. Rows without a value come last in both directions. */
export function sortRows(rows, column, isDescending) {
  const keys = sortKeys(column);
  const sign = isDescending ? -1 : 1;
  return rows.sort((one, other) => {
    const [a, b] = [keys[one], keys[other]];
    if (a === b) return one - other;
    if (a !== a) return b !== b ? one - other : 1;
    if (b !== b) return -1;
    return a < b ? -sign : sign;
  });
}

function sortKeys({ kind, values, dictionary }) {
  if (kind === "flag") return Float64Array.from(values, (value) => (value > 1 ? NaN : value));
  if (kind !== "text") return values;
  const order = [...dictionary.keys()].sort((one, other) => compareTexts(dictionary[one], dictionary[other]));
  const ranks = new Float64Array(dictionary.length);
  order.forEach((code, rank) => (ranks[code] = rank));
  return Float64Array.from(values, (code) => (code < 0 ? NaN : ranks[code]));
}

const compareTexts = new Intl.Collator("en", { numeric: true }).compare;

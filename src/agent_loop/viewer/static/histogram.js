// Histogram of a column: all rows pale, with the shown rows in front of them.

import { svg } from "./dom.js";
import { number } from "./format.js";

const BINS = 24;
const WIDTH = 72;
const HEIGHT = 14;
const spreads = new WeakMap();

export function columnHistogram(table, { name, label }, rows) {
  const column = table.column(name);
  if (column.kind !== "number" || !table.length) return null;
  const { low, high, all } = spreadOf(column.values);
  if (!(high > low)) return null;
  const shown = countsOf(column.values, rows, low, high);
  const tallest = Math.max(...all);
  const bar = (count, bin) => {
    const height = count && Math.max(1, (count / tallest) * HEIGHT);
    return height
      ? `M${(bin * WIDTH) / BINS} ${HEIGHT - height}h${WIDTH / BINS - 0.6}V${HEIGHT}h-${WIDTH / BINS - 0.6}z`
      : "";
  };
  return svg(
    "svg.histogram",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${label} from ${number(low)} to ${number(high)}`,
    },
    svg("title", {}, `${number(low)} to ${number(high)}`),
    svg("path.all", { d: all.map((count, bin) => bar(count, bin)).join("") }),
    svg("path.shown", { d: shown.map((count, bin) => bar(count, bin)).join("") }),
  );
}

/** Returns the histogram of all rows, cached until rows are added. */
function spreadOf(values) {
  if (!spreads.has(values)) {
    const [low, high] = rangeOf(values);
    spreads.set(values, { low, high, all: high > low ? countsOf(values, null, low, high) : [] });
  }
  return spreads.get(values);
}

function rangeOf(values) {
  let low = Infinity;
  let high = -Infinity;
  for (let row = 0; row < values.length; row++) {
    const value = values[row];
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function countsOf(values, rows, low, high) {
  const counts = new Array(BINS).fill(0);
  const scale = BINS / (high - low);
  const length = rows ? rows.length : values.length;
  for (let place = 0; place < length; place++) {
    const value = values[rows ? rows[place] : place];
    if (value === value) counts[Math.min(BINS - 1, Math.floor((value - low) * scale))]++;
  }
  return counts;
}

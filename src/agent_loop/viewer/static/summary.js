// The rows that are shown, in one line.

import { h } from "./dom.js";
import { number, seconds, share } from "./format.js";

export function summaryOf(table, rows) {
  const parts = [
    ["reward", mean(table, "reward", rows), number],
    ["success", mean(table, "is_success", rows), share],
    ["turns", mean(table, "num_turns", rows), number],
    ["response", mean(table, "response_length", rows), number],
    ["time", mean(table, "seconds", rows), seconds],
  ].filter(([, value]) => value !== null);
  const isAll = rows.length === table.length;
  return [
    h("b", {}, number(rows.length)),
    isAll ? " trajectories" : ` of ${number(table.length)} trajectories`,
    parts.map(([label, value, format]) => [
      " · ",
      h("span.muted", {}, `mean ${label} `.replace("mean success", "success")),
      format(value),
    ]),
  ];
}

function mean(table, name, rows) {
  const column = table.column(name);
  if (!column) return null;
  const { values, kind } = column;
  let sum = 0;
  let count = 0;
  for (let place = 0; place < rows.length; place++) {
    const value = values[rows[place]];
    if (value !== value || (kind === "flag" && value > 1)) continue;
    sum += value;
    count++;
  }
  return count ? sum / count : null;
}

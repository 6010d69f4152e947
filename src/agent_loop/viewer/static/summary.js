// One-line summary of the shown rows.

import { h } from "./dom.js";
import { number, seconds, share } from "./format.js";
import { meanOverRollouts } from "./rollout_means.js";

export function summaryOf(table, rows) {
  const parts = [
    ["reward", meanOverRollouts(table, "reward", rows), number],
    ["success", meanOverRollouts(table, "is_success", rows), share],
    ["turns", meanOverRollouts(table, "num_assistant_turns", rows), number],
    ["response", meanOverRollouts(table, "response_length", rows), number],
    ["time", meanOverRollouts(table, "seconds", rows), seconds],
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

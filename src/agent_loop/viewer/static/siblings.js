// Links to the other trajectories of a group and the other branches of a rollout.

import { h } from "./dom.js";
import { number } from "./format.js";
import { address } from "./router.js";

/** Returns the rows of a group in order. */
export function siblingRows(table, { split, step, group }) {
  const rows = [];
  const code = table.column("split")?.dictionary.indexOf(split);
  const [splits, steps, groups] = ["split", "step", "group"].map((name) => table.column(name)?.values);
  if (!splits || !steps || !groups) return rows;
  for (let row = 0; row < table.length; row++) {
    if (groups[row] === group && steps[row] === step && splits[row] === code) rows.push(row);
  }
  const place = (row) => [table.value("rollout", row) ?? 0, table.value("branch", row) ?? -1];
  return rows.sort((one, other) => {
    const [[a, b], [c, d]] = [place(one), place(other)];
    return a - c || b - d;
  });
}

/** Returns a link for each of these rows. */
export function siblingChips(table, rows, { split, step, id, keep }) {
  return rows.map((row) => {
    const other = table.value("trajectory_id", row);
    const reward = table.value("reward", row);
    const branch = table.value("branch", row);
    const name = `${table.value("rollout", row)}${branch === null ? "" : `.${branch}`}`;
    return h(
      `a.sibling.${toneOf(table, row)}`,
      {
        href: address("trajectory", { split, step, id: other, ...keep }),
        "aria-current": other === id ? "true" : null,
        title: `${other}: reward ${number(reward)}, ${table.value("stop_reason", row)}`,
      },
      h("span.sibling-name", {}, name),
      h("span", {}, number(reward)),
    );
  });
}

export function toneOf(table, row) {
  if (table.value("failure", row) !== null) return "failed";
  const isSuccess = table.value("is_success", row);
  return isSuccess === null ? "plain" : isSuccess ? "good" : "bad";
}

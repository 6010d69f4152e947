// Findings about the newest step: failures, incidents, groups without signal, and the slowest trajectory.

import { h } from "./dom.js";
import { clipped, number, plural, seconds, share } from "./format.js";
import { address } from "./router.js";

/** Returns a list of findings about the newest step of a split; null without trajectories. */
export function digest(table, split) {
  const step = newestStep(table, split);
  if (step === null) return null;
  const rows = rowsOf(table, split, step);
  const filter = { "f.split": `=${split}`, "f.step": step };
  const findings = [
    failures(table, rows, filter),
    worstIncidents(table, rows, filter),
    deadGroups(table, rows, filter),
    slowest(table, rows),
    mismatch(table, rows),
  ].filter(Boolean);
  return { step, split, count: rows.length, findings, filter };
}

/** Returns the newest step of a split; null if it has no trajectories. */
export function newestStep(table, split) {
  if (!table.has("step") || !table.has("split")) return null;
  const code = table.column("split").dictionary.indexOf(split);
  const [splits, steps] = [table.column("split").values, table.column("step").values];
  let newest = null;
  for (let row = 0; row < table.length; row++) {
    if (splits[row] === code && (newest === null || steps[row] > newest)) newest = steps[row];
  }
  return newest;
}

export function rowsOf(table, split, step) {
  const code = table.column("split").dictionary.indexOf(split);
  const [splits, steps] = [table.column("split").values, table.column("step").values];
  const rows = [];
  for (let row = 0; row < table.length; row++)
    if (splits[row] === code && steps[row] === step) rows.push(row);
  return rows;
}

function failures(table, rows, filter) {
  const errors = rows.map((row) => table.value("failure", row)).filter((error) => error !== null);
  if (!errors.length) return null;
  const counts = new Map();
  for (const error of errors) counts.set(error, (counts.get(error) ?? 0) + 1);
  const [commonest, count] = [...counts].sort((one, other) => other[1] - one[1])[0];
  return finding("bad", address("trajectories", { ...filter, "f.failure": "!none" }), [
    h("b", {}, `${plural(errors.length, "trajectory", "trajectories")} failed`),
    ` (${share(errors.length / rows.length)}), ${count} of them with `,
    h("code", {}, clipped(commonest, 160)),
  ]);
}

function worstIncidents(table, rows, filter) {
  if (!table.has("num_incidents")) return null;
  const touched = rows.filter((row) => table.value("num_incidents", row) > 0);
  if (!touched.length) return null;
  const failed = rows.filter((row) => table.value("num_failed_calls", row) > 0).length;
  return finding(
    "warn",
    address("trajectories", { ...filter, "f.num_incidents": ">0", sort: "-num_incidents" }),
    [
      h("b", {}, `${plural(touched.length, "trajectory", "trajectories")} with incidents`),
      ` (${share(touched.length / rows.length)})`,
      failed ? `, ${failed} with failed tool calls` : "",
    ],
  );
}

function deadGroups(table, rows, filter) {
  const groups = new Map();
  for (const row of rows) {
    const group = table.value("group", row);
    const reward = table.value("reward", row);
    if (reward === null) continue;
    if (!groups.has(group)) groups.set(group, new Set());
    groups.get(group).add(reward);
  }
  const same = [...groups.values()].filter((rewards) => rewards.size === 1).length;
  if (!same || groups.size < 2) return null;
  return finding("note", address("trajectories", { ...filter, sort: "group" }), [
    h("b", {}, `${same} of ${plural(groups.size, "group")} without signal`),
    ": all rewards of a group are equal",
  ]);
}

function slowest(table, rows) {
  const [row, time] = largest(table, rows, "seconds");
  if (row === null || !(time > 0)) return null;
  const times = rows
    .map((one) => table.value("seconds", one))
    .filter((value) => value !== null)
    .sort((a, b) => a - b);
  const median = times[Math.floor(times.length / 2)];
  return finding("note", linkTo(table, row), [
    h("b", {}, `Slowest: ${table.value("trajectory_id", row)}`),
    ` took ${seconds(time)}, ${number(time / Math.max(median, 1e-9))} times the median`,
  ]);
}

function mismatch(table, rows) {
  const [row, difference] = largest(table, rows, "logprob_diff_max");
  if (row === null || difference < 0.1) return null;
  return finding("warn", linkTo(table, row, { view: "tokens", color: "difference" }), [
    h("b", {}, `Log-probs differ by ${number(difference)}`),
    ` between trainer and rollout in ${table.value("trajectory_id", row)}`,
  ]);
}

function largest(table, rows, name) {
  let best = [null, -Infinity];
  for (const row of rows) {
    const value = table.value(name, row);
    if (value !== null && value > best[1]) best = [row, value];
  }
  return best;
}

/** Returns the address of a trajectory's page. */
export function linkTo(table, row, more = {}) {
  return address("trajectory", {
    split: table.value("split", row),
    step: table.value("step", row),
    id: table.value("trajectory_id", row),
    ...more,
  });
}

function finding(kind, href, children) {
  return h(`li.finding.${kind}`, {}, h("a", { href }, children));
}

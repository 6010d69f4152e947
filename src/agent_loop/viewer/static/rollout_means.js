// Means over rollouts. The branches of a rollout share its weight.

/** Returns the mean of a column over these rows; null if no row has a value. */
export function meanOverRollouts(table, name, rows) {
  const column = table.column(name);
  if (!column) return null;
  const { values, kind } = column;
  const rolloutOf = rolloutNames(table);
  const rollouts = new Map();
  let sum = 0;
  let count = 0;
  for (let place = 0; place < rows.length; place++) {
    const row = rows[place];
    const value = values[row];
    if (value !== value || (kind === "flag" && value > 1)) continue;
    const rollout = rolloutOf?.(row) ?? null;
    if (rollout === null) {
      sum += value;
      count++;
      continue;
    }
    const found = rollouts.get(rollout) ?? { sum: 0, count: 0 };
    found.sum += value;
    found.count++;
    rollouts.set(rollout, found);
  }
  for (const rollout of rollouts.values()) sum += rollout.sum / rollout.count;
  count += rollouts.size;
  return count ? sum / count : null;
}

/** Returns a function from a row to the name of its rollout, or null for a rollout without branches. Returns null if
 * the table has no branches. */
function rolloutNames(table) {
  const columns = ["split", "step", "group", "rollout", "branch"].map((name) => table.column(name)?.values);
  if (columns.includes(undefined)) return null;
  const [splits, steps, groups, numbers, branches] = columns;
  if (!branches.some((branch) => branch === branch)) return null;
  return (row) =>
    branches[row] === branches[row] ? `${splits[row]}/${steps[row]}/${groups[row]}/${numbers[row]}` : null;
}

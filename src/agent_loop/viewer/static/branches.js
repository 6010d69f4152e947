// Tree of the branches of a rollout. The parent of a branch is the branch with the longest common prefix.

import { h } from "./dom.js";
import { number, plural } from "./format.js";
import { address } from "./router.js";
import { Trajectory } from "./trajectory.js";

const MOST = 40;

/** Loads the branches and returns the tree; null if there is only one branch. */
export async function branchTree(run, { split, step, id }, rows) {
  if (rows.length < 2) return null;
  const ids = rows.slice(0, MOST).map((row) => run.table.value("trajectory_id", row));
  const branches = [];
  for (const one of ids) branches.push(new Trajectory(await run.source.trajectory({ split, step, id: one })));
  const nodes = ids.map((name, index) => ({
    name,
    trajectory: branches[index],
    children: [],
    parent: null,
    common: 0,
  }));
  nodes.forEach((node, index) => nodes.slice(0, index).forEach((earlier) => setParentIfCloser(node, earlier)));
  for (const node of nodes) node.parent?.children.push(node);
  const roots = nodes.filter((node) => !node.parent);
  return h(
    "details.branches",
    { open: true },
    h("summary", {}, `${plural(rows.length, "branch", "branches")}`),
    h(
      "ul.tree",
      {},
      roots.map((root) => nodeOf(root, { split, step, id })),
    ),
    rows.length > MOST && h("p.muted", {}, `The first ${MOST} are shown.`),
  );
}

function setParentIfCloser(node, earlier) {
  const common = commonLength(node.trajectory.ids, earlier.trajectory.ids);
  if (common > node.common) [node.parent, node.common] = [earlier, common];
}

export function commonLength(one, other) {
  const most = Math.min(one.length, other.length);
  let length = 0;
  while (length < most && one[length] === other[length]) length++;
  return length;
}

function nodeOf({ name, trajectory, children, parent, common }, place) {
  const { meta } = trajectory;
  const leaves = parent && parent.trajectory.blockAt(Math.max(0, common - 1));
  const where =
    parent &&
    `leaves branch ${parent.trajectory.meta.branch} after ${plural(common, "token")}${leaves?.turn ? `, in turn ${leaves.turn}` : ""}`;
  return h(
    "li",
    {},
    h(
      "a",
      {
        href: address("trajectory", { split: place.split, step: place.step, id: name }),
        "aria-current": name === place.id ? "true" : null,
      },
      `branch ${meta.branch ?? "–"}`,
    ),
    h(
      "span.muted",
      {},
      ` reward ${number(meta.reward)} · ${plural(trajectory.turns.length, "turn")}${where ? ` · ${where}` : ""}`,
    ),
    children.length > 0 &&
      h(
        "ul",
        {},
        children.map((child) => nodeOf(child, place)),
      ),
  );
}

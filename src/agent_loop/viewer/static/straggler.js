// Sentence about the trajectory that ended last in a step.

import { h } from "./dom.js";
import { plural, seconds, share } from "./format.js";

/** @param entries  Entries of one step or several; times in seconds. */
export function describeEnd(entries, steps, linkOf) {
  if (!entries.length) return "The trajectories of this step have no times, because they were not traced.";
  const last = entries.reduce((one, other) => (other.end > one.end ? other : one));
  const ends = entries.map(({ end }) => end).sort((one, other) => one - other);
  const before = ends.at(-2);
  const half = ends[Math.floor(ends.length / 2)];
  const [kind, time] = last.sums[0] ?? ["nothing", 0];
  const where = last.spans
    .filter((span) => span.kind === kind)
    .reduce((one, span) => longer(one, span), null);
  const what = steps.length === 1 ? `Step ${steps[0]}` : `Steps ${steps[0]} to ${steps.at(-1)}`;
  return [
    h("b", {}, `${what}: ${plural(entries.length, "trajectory", "trajectories")} in ${seconds(last.end)}`),
    ". The last to end was ",
    h("a", { href: linkOf(last) }, last.trajectory_id),
    `, ${share(time / Math.max(last.seconds, 1e-9))} of its time in ${kind}${where?.name ? ` (${where.name}, ${seconds(where.end - where.start)} at once)` : ""}`,
    before !== undefined && `; it ran alone for the last ${seconds(last.end - before)}`,
    entries.length > 2 && `. During the last ${seconds(last.end - half)} at most half of the trajectories were running`,
    ".",
  ];
}

function longer(one, other) {
  return !one || other.end - other.start > one.end - one.start ? other : one;
}

// How the values of a metric are shown: their format, and the range of the values that are possible.

import { number, seconds, share } from "./format.js";

const SHARE = /_share$|_fraction$|pass@\d+$|^rollout\/stop_reason\//;
const NEVER_NEGATIVE = /_length\/|\/num_|entropy$|grad_norm$|staleness|incidents\/|^timing_s\/|_s\/|^perf\//;

const isTime = (name) => name.startsWith("timing_s/") || name.includes("_s/");

export function formatOf(name) {
  if (isTime(name)) return seconds;
  return SHARE.test(name) ? share : number;
}

/** Returns the least and the greatest possible value of a metric. */
export function rangeOf(name) {
  if (formatOf(name) === share) return [0, 1];
  return NEVER_NEGATIVE.test(name) ? [0, Infinity] : [-Infinity, Infinity];
}

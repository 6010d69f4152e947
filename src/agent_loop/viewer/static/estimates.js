// Texts of estimates, which are `[value, low, high]`; low and high are null if there is no interval.

import { number, signed } from "./format.js";

/** Returns an estimate with its interval, as in `0.5 (0.4 to 0.6)`. */
export function estimateText(estimate, format = number) {
  if (!estimate) return "–";
  const [value, low, high] = estimate;
  return low === null || high === null ? format(value) : `${format(value)} (${format(low)} to ${format(high)})`;
}

/** Formats a difference of shares in percentage points. */
export function points(value) {
  return `${signed(Math.round(1000 * value) / 10)} points`;
}

/** Returns the tone of a difference: good or bad if its interval does not contain 0. */
export function toneOfDifference(estimate) {
  if (!estimate || estimate[1] === null) return "";
  return estimate[1] > 0 ? "good" : estimate[2] < 0 ? "bad" : "";
}

// Facts about a trajectory apart from its conversation: failure and incidents, times, numbers and data.

import { describe } from "./columns.js";
import { h } from "./dom.js";
import { clipped, number, seconds, signed } from "./format.js";
import { kindLegend, secondsByKind, secondsWithoutSpan, spanBar, withPrefill } from "./spans.js";

const DATA = ["row", "reward_extra", "extra_fields", "tool_schemas", "metrics"];
const ELSEWHERE = new Set([
  ...DATA,
  "split",
  "step",
  "trajectory_id",
  "group",
  "rollout",
  "branch",
  "answer",
  "failure",
  "failure_traceback",
]);
const MOST_LETTERS = 300;
/** Least share of the whole time at which the time outside all spans is listed. */
const LEAST_OTHER = 0.005;

/** Returns a section with the failure and the incidents; null if there are none. */
export function whyOf(trajectory) {
  const { meta, incidents } = trajectory;
  if (!meta.failure && !incidents.length) return null;
  return h(
    "section.why",
    { "aria-label": "What went wrong" },
    meta.failure && h("p", {}, h("b", {}, "Failed: "), meta.failure),
    meta.failure_traceback &&
      h("details", {}, h("summary", {}, "traceback"), h("pre", { tabindex: "0" }, meta.failure_traceback)),
    incidents.length > 0 &&
      h(
        "ul",
        {},
        incidents.map((item) =>
          h(
            "li",
            {},
            h("b", {}, String(item.kind).replaceAll("_", " ")),
            ` after turn ${item.assistant_turn}: ${item.detail}`,
          ),
        ),
      ),
  );
}

/** Returns a section with the spans as a bar, and the seconds of each kind; null without a trace. */
export function timeOf(trajectory) {
  const spans = withPrefill(trajectory.spans);
  if (!spans.length) return null;
  const to = Math.max(trajectory.meta.seconds ?? 0, ...spans.map((span) => span.end));
  const sums = secondsByKind(spans);
  const other = secondsWithoutSpan(spans, to);
  const listed = other > LEAST_OTHER * to ? [...sums, ["other", other]] : sums;
  const bars = spans.map((span) => spanBar(span, { from: 0, to }));
  return [
    h("h3", {}, "Time"),
    h(".time-line", {}, bars),
    kindLegend(new Set(sums.map(([kind]) => kind))),
    list(listed.map(([kind, time]) => [kind === "prefill" ? "prefill (in generate)" : kind, seconds(time)])),
  ];
}

export function numbersOf({ meta }) {
  const facts = Object.entries(meta).filter(([name, value]) => isFact(name, value));
  return [
    h("h3", {}, "Numbers"),
    list(facts.map(([name, value]) => [describe(name).label, valueText(name, value)])),
  ];
}

/** Returns collapsed sections with the data of the row, the reward function and the loop. */
export function dataOf({ meta }) {
  return DATA.filter((name) => hasContent(meta[name])).map((name) =>
    h(
      "details.data",
      {},
      h("summary", {}, name.replaceAll("_", " ")),
      h("pre", { tabindex: "0" }, JSON.stringify(meta[name], null, 2)),
    ),
  );
}

function list(entries) {
  return h(
    "dl.numbers",
    {},
    entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/** Returns whether a column is listed here. Times are shown beside their bars, and some columns elsewhere. */
function isFact(name, value) {
  const isElsewhere = ELSEWHERE.has(name) || name.endsWith("_s");
  return !isElsewhere && value !== null && typeof value !== "object";
}

function hasContent(value) {
  return (
    value !== null && value !== undefined && (typeof value !== "object" || Object.keys(value).length > 0)
  );
}

function valueText(name, value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return clipped(String(value), MOST_LETTERS);
  if (name === "began_at") return new Date(1000 * value).toLocaleString();
  if (name === "seconds" || name.endsWith("_s")) return seconds(value);
  return name === "advantage" ? signed(value) : number(value);
}

// Spans of a trajectory as bars on a time line.

import { h } from "./dom.js";
import { seconds, labelOf } from "./format.js";

/** Kinds of spans in the order of the legend. The CSS class of a kind defines its colour. */
export const KINDS = [
  "admission",
  "queue",
  "prefill",
  "generate",
  "tool",
  "interaction",
  "reward",
  "encode",
  "close",
  "journal",
  "user",
];

/** Pseudo kind of the bar from the start to the end of a trajectory. */
export const WHOLE = "whole";

export function kindClass(kind) {
  return KINDS.includes(kind) || kind === WHOLE ? `kind-${kind}` : "kind-user";
}

/** Returns the bar of a span. `from` and `to` are shares of the time line. */
export function spanBar(span, { from, to, onclick }) {
  const length = to - from;
  const left = Math.max(0, (span.start - from) / length);
  const right = Math.min(1, (span.end - from) / length);
  if (right <= 0 || left >= 1) return null;
  return h(`span.bar.${kindClass(span.kind)}`, {
    style: { left: `${100 * left}%`, width: `max(1.5px, ${100 * (right - left)}%)` },
    title: spanTitle(span),
    onclick,
  });
}

export function spanTitle({ kind, name, start, end, details }) {
  const more = Object.entries(details ?? {}).filter(
    ([, value]) => value !== null && typeof value !== "object",
  );
  const parts = [`${kind}${name ? ` ${name}` : ""}: ${seconds(end - start)}, from ${seconds(start)}`];
  return [...parts, ...more.map(([key, value]) => `${labelOf(key)} ${value}`)].join("\n");
}

/** Returns the spans with the prefill of each completion as a separate span, where it is known. */
export function withPrefill(spans) {
  return spans.flatMap((span) => {
    const prefill = span.details?.prefill_s;
    if (span.kind !== "generate" || !(prefill > 0)) return [span];
    return [span, { ...span, kind: "prefill", end: Math.min(span.end, span.start + prefill) }];
  });
}

/** Returns the seconds by kind. Overlapping spans are counted separately. */
export function secondsByKind(spans) {
  const sums = new Map();
  for (const { kind, start, end } of spans) sums.set(kind, (sums.get(kind) ?? 0) + end - start);
  return [...sums].sort((one, other) => other[1] - one[1]);
}

/** Returns the seconds from 0 to `end` in which no span is open. */
export function secondsWithoutSpan(spans, end) {
  let [free, covered] = [0, 0];
  for (const span of [...spans].sort((one, other) => one.start - other.start)) {
    free += Math.max(0, Math.min(span.start, end) - covered);
    covered = Math.max(covered, span.end);
  }
  return free + Math.max(0, end - covered);
}

export function kindLegend(kinds) {
  return h(
    ".legend",
    {},
    KINDS.filter((kind) => kinds.has(kind)).map((kind) =>
      h("span.key", {}, h(`span.swatch.${kindClass(kind)}`, { "aria-hidden": "true" }), kind),
    ),
  );
}

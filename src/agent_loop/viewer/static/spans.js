// What a trajectory waited for, as bars on a line of time.

import { h } from "./dom.js";
import { seconds, spoken } from "./format.js";

/** In the order in which they are told; their class gives the colour. */
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

/** Not a wait: from beginning to end. */
export const WHOLE = "whole";

export function kindClass(kind) {
  return KINDS.includes(kind) || kind === WHOLE ? `kind-${kind}` : "kind-user";
}

/** A bar of a span; times are shares of the line. */
export function spanBar(span, { from, to, onclick }) {
  const length = to - from;
  const left = Math.max(0, (span.start - from) / length);
  const right = Math.min(1, (span.end - from) / length);
  if (right <= 0 || left >= 1) return null;
  return h(`span.bar.${kindClass(span.kind)}`, {
    style: { left: `${100 * left}%`, width: `max(1.5px, ${100 * (right - left)}%)` },
    title: told(span),
    onclick,
  });
}

export function told({ kind, name, start, end, details }) {
  const more = Object.entries(details ?? {}).filter(
    ([, value]) => value !== null && typeof value !== "object",
  );
  const parts = [`${kind}${name ? ` ${name}` : ""}: ${seconds(end - start)}, from ${seconds(start)}`];
  return [...parts, ...more.map(([key, value]) => `${spoken(key)} ${value}`)].join("\n");
}

/** Spans with the prefill of a completion, where it is known, as a span of its own. */
export function withPrefill(spans) {
  return spans.flatMap((span) => {
    const prefill = span.details?.prefill_s;
    if (span.kind !== "generate" || !(prefill > 0)) return [span];
    return [span, { ...span, kind: "prefill", end: Math.min(span.end, span.start + prefill) }];
  });
}

/** Seconds by kind, those that overlap counted each. */
export function secondsByKind(spans) {
  const sums = new Map();
  for (const { kind, start, end } of spans) sums.set(kind, (sums.get(kind) ?? 0) + end - start);
  return [...sums].sort((one, other) => other[1] - one[1]);
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
